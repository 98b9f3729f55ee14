"""The two sides of the comparison, each run by `bench_mini.py` in a process of its own.

`python perf/parts.py engine ARTIFACT CONFIG` and `python perf/parts.py reference MODEL THREADS`
print one JSON object each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS = 512
PROMPTS = 5  # measured prompts of 512 tokens, after one that is not
STEPS = 30  # measured steps of a decode bucket
CHUNKS = 8  # measured steps of a prefill bucket
REFERENCE_STEPS = 7
REFERENCE_PROMPTS = 3


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, fastest and slowest of measured seconds, in milliseconds."""
    ms = [s * 1e3 for s in seconds]
    return {
        "median_ms": round(statistics.median(ms), 3),
        "min_ms": round(min(ms), 3),
        "max_ms": round(max(ms), 3),
        "n": len(ms),
    }


def prompts(vocab: int, count: int) -> list[list[int]]:
    """Return random prompts of 512 tokens."""
    return np.random.default_rng(0).integers(0, vocab, (count, PROMPT_TOKENS)).tolist()


def active_weight_bytes(weights: Any, experts_share: float) -> int:
    """Return the weight bytes that decoding one token of one request must read.

    Args:
        weights: The manifest's weights.
        experts_share: Experts of a token over all experts.

    Every weight but the embedding, of which one row is read, and what only scoring reads; of the
    routed experts, the only MXFP4 weights, the share that a token is sent to. Padding is not
    counted, bytes that two weights share are counted once.
    """
    places = {}
    for entry in weights:
        if any("embed_tokens" in source for source in entry.sources):
            continue
        share = experts_share if entry.dtype == "mxfp4" else 1.0
        places[entry.offset] = (entry.nbytes - entry.padding_bytes) * share
    return round(sum(places.values()))


def engine(artifact: Path, config: Path) -> dict[str, Any]:
    """Measure every bucket and prompts of 512 tokens on the compiled artifact."""
    import k3c
    from k3c.bench import measure_bucket
    from k3c.runtime.cache.prefix import PrefixOptions

    start_s = time.perf_counter()
    found = k3c.load(artifact, prefix=PrefixOptions(on=False))
    load_s = time.perf_counter() - start_s
    vocab = found.manifest.model.vocab_size
    buckets = [b for b in found.manifest.buckets if b.phase != "score"]
    rates = {
        b.name: asdict(measure_bucket(found, b, STEPS if b.phase == "decode" else CHUNKS))
        for b in buckets
    }
    seconds = []
    for prompt in prompts(vocab, PROMPTS + 1):
        start_s = time.perf_counter()
        found.generate([prompt], 1)
        seconds.append(time.perf_counter() - start_s)
    text = json.loads(config.read_text())["text_config"]
    share = text["num_experts_per_token"] / text["num_experts"]
    return {
        "buckets": rates,
        "prompt_512": spread(seconds[1:]),
        "load_s": round(load_s, 4),
        "active_weight_bytes": active_weight_bytes(found.manifest.weights, share),
        "weights_bytes": found.manifest.space_bytes["weights"],
        "target": found.manifest.target.name,
    }


def reference(model: Path, threads: int) -> dict[str, Any]:
    """Measure the model in eager PyTorch, bf16."""
    import torch

    from k3c.model.text import TextModel

    torch.set_num_threads(threads)
    found = TextModel.from_checkpoint(model, torch.bfloat16)
    vocab = found.config.vocab_size
    with torch.inference_mode():
        decode_s = _reference_decode(found, prompts(vocab, 1)[0][:1])
        prompt_s = []
        for prompt in prompts(vocab, REFERENCE_PROMPTS + 1):
            state = found.new_state(1, PROMPT_TOKENS)
            start_s = time.perf_counter()
            found([prompt], state)
            prompt_s.append(time.perf_counter() - start_s)
    return {"decode_b1": spread(decode_s), "prompt_512": spread(prompt_s[1:])}


def _reference_decode(model: Any, prompt: list[int]) -> list[float]:
    """Return the seconds of steps that decode one token of one request, after two that are not."""
    state = model.new_state(1, REFERENCE_STEPS + 4)
    (logits,), state = model([prompt], state)
    seconds = []
    for _ in range(REFERENCE_STEPS + 2):
        start_s = time.perf_counter()
        token = int(logits[-1].argmax())
        (logits,), state = model([[token]], state)
        seconds.append(time.perf_counter() - start_s)
    return seconds[2:]


def main() -> None:
    """Run one side."""
    side, path, other = sys.argv[1:]
    done = (
        engine(Path(path), Path(other)) if side == "engine" else reference(Path(path), int(other))
    )
    print(json.dumps(done))


if __name__ == "__main__":
    main()
