"""What stands on the wire between a chat request and token ids, both ways.

    renderer.render(request) -> Prompt; segments.encode(prompt.segments, tokenizer) -> ids
    streams.TokenStream(tokenizer, options): push(ids) -> deltas; finish(); answer(reason)

It needs tiktoken and `k3c.errors`, nothing else of k3c.
"""
