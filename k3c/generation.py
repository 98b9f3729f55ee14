"""`k3c generate`: run prompts on an artifact, stream text, report what happened."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import k3c
from k3c.errors import ConfigError, DeviceFault
from k3c.token_files import read_token_lists

if TYPE_CHECKING:
    from k3c.runtime.engine import Engine
    from k3c.runtime.events import Event
    from k3c.runtime.request import SamplingOptions
    from k3c.runtime.server.wire.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class GenerateOptions:
    """What the user asked for: exactly one of `prompt` and `tokens`."""

    prompt: str | None
    tokens: Path | None
    max_tokens: int
    top_logprobs: int
    as_json: bool
    sampling: SamplingOptions


@dataclass
class Output:
    """The result of one request, as the JSON form prints it."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


def _prompts(options: GenerateOptions, tokenizer: Tokenizer | None) -> list[list[int]]:
    if (options.prompt is None) == (options.tokens is None):
        raise ConfigError("give exactly one of --prompt and --tokens", "k3c generate")
    if options.tokens is not None:
        return read_token_lists(options.tokens)
    if tokenizer is None:
        raise ConfigError("the artifact has no tokenizer", "--prompt", "give ids with --tokens")
    return [tokenizer.encode(options.prompt or "")]


def generate(artifact: Path, options: GenerateOptions) -> None:
    """Run the prompts together and print their continuations.

    Args:
        artifact: The artifact directory.
        options: Prompts, limits and output form.

    Raises:
        ConfigError: Prompt source, ids, lengths or sampling values are wrong.
        DeviceFault: A request ended because its logits were not finite.
    """
    start_s = time.monotonic()
    engine = k3c.load(artifact)
    load_s = time.monotonic() - start_s
    prompts = _prompts(options, engine.tokenizer)
    stream = len(prompts) == 1 and not options.as_json
    outputs, timings = _run(engine, prompts, options, _Printer(engine.tokenizer, stream))
    timings["load_s"] = round(load_s, 6)
    if options.as_json:
        print(json.dumps({"requests": [asdict(o) for o in outputs], "timings": timings}))
    else:
        _print_outputs(outputs, timings, stream)
    failed = [i for i, o in enumerate(outputs) if o.finish_reason == "error"]
    if failed:
        raise DeviceFault("the model gave logits that are not finite", f"requests {failed}")


class _Printer:
    """Turns the events of all requests into text, and prints it at once where `stream` is set."""

    def __init__(self, tokenizer: Tokenizer | None, stream: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._decoders: dict[int, StreamDecoder] = {}

    def push(self, event: Event) -> str:
        """Return the text that an event adds; the stop token has none."""
        if self._tokenizer is None:
            return ""
        decoder = self._decoders.setdefault(event.request_id, self._tokenizer.stream())
        text = ""
        if event.token_id is not None and event.finish_reason != "stop":
            text = decoder.push(event.token_id)
        text += decoder.finish() if event.finish_reason else ""
        if self._stream and text:
            print(text, end="", flush=True)
        return text


def _record(output: Output, event: Event, text: str) -> None:
    """Add one event to a request's output."""
    output.finish_reason = event.finish_reason or ""
    output.text += text
    if event.token_id is not None:
        output.token_ids.append(event.token_id)
        output.top_logprobs.extend([list(event.top_logprobs)] if event.top_logprobs else [])


def _run(
    engine: Engine, prompts: list[list[int]], options: GenerateOptions, printer: _Printer
) -> tuple[list[Output], dict[str, float]]:
    outputs: dict[int, Output] = {}
    for prompt in prompts:
        count, sampling = options.top_logprobs, options.sampling
        request = engine.add(prompt, options.max_tokens, top_logprobs=count, **sampling)
        outputs[request] = Output(list(prompt))
    start_s = time.monotonic()
    first_s = None
    while engine.has_work:
        for event in engine.step():
            _record(outputs[event.request_id], event, printer.push(event))
            first_s = first_s or time.monotonic()
    done = list(outputs.values())
    return done, _timings(done, start_s, first_s or start_s)


def _timings(outputs: list[Output], start_s: float, first_s: float) -> dict[str, float]:
    end_s = time.monotonic()
    generated = sum(len(o.token_ids) for o in outputs)
    decoded = generated - len(outputs)
    return {
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
        "generated_tokens": generated,
        "first_token_s": round(first_s - start_s, 6),
        "total_s": round(end_s - start_s, 6),
        "decode_tokens_per_s": round(decoded / max(end_s - first_s, 1e-9), 3),
    }


def _print_outputs(outputs: list[Output], timings: dict[str, float], streamed: bool) -> None:
    if streamed:
        print("" if outputs[0].text else outputs[0].token_ids)
    else:
        for index, output in enumerate(outputs):
            print(f"[{index}] {output.text or output.token_ids} ({output.finish_reason})")
    print(
        f"{timings['prompt_tokens']} prompt tokens, {timings['generated_tokens']} generated; "
        f"load {timings['load_s'] * 1e3:.0f} ms, "
        f"first token {timings['first_token_s'] * 1e3:.0f} ms, "
        f"{timings['decode_tokens_per_s']:.0f} tokens/s",
        file=sys.stderr,
    )
