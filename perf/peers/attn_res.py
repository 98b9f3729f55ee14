"""AttnRes with the sum before it and the norm after it: vLLM's Triton kernel, and torch.compile."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import torch

from perf.peers.case import Call, Case, random_bf16, sets_for

WIDTH, EPS, BLOCKS = 7168, 1e-6, 8
SOURCES, TOKENS = (5, 9), (1, 64, 2048, 8192)
LIBRARIES: tuple[str, ...] = ()
Source = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # prefix, delta, snapshots


def cases() -> Iterator[Case]:
    """Yield every point with both peers."""
    kernel = vllm_attn_res()
    compiled = torch.compile(plain, dynamic=False)
    norm, query, out_norm = (random_bf16(WIDTH, scale=s) for s in (1.0, 0.02, 1.0))
    for sources in SOURCES:
        for tokens in TOKENS:
            nbytes = 2.0 * tokens * WIDTH * (sources + 3)
            sets = [_source(tokens) for _ in range(sets_for(nbytes, 1500 if tokens < 2048 else 2))]
            shape = f"{sources} sources T{tokens}"
            calls: list[Call] = [
                lambda s=s, n=sources: kernel(*s, norm, query, out_norm, n - 1, -1, EPS, EPS)
                for s in sets
            ]
            yield Case("attn_res", shape, "vLLM Triton", calls, nbytes)
            calls = [
                lambda s=s, n=sources: compiled(s[0], s[1], s[2][:, : n - 1], norm, query, out_norm)
                for s in sets
            ]
            yield Case("attn_res", shape, "torch.compile", calls, nbytes)
            del sets
            torch.cuda.empty_cache()


def _source(tokens: int) -> Source:
    prefix, delta = random_bf16(tokens, WIDTH), random_bf16(tokens, WIDTH)
    return prefix, delta, random_bf16(tokens, BLOCKS, WIDTH)


def plain(
    prefix: torch.Tensor, delta: torch.Tensor, blocks: torch.Tensor,
    norm: torch.Tensor, query: torch.Tensor, out_norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the normed mix of `blocks` and the new prefix, and the new prefix."""
    last = prefix + delta
    sources = torch.cat((blocks, last[:, None]), 1).float()
    scale = torch.rsqrt(sources.square().mean(-1) + EPS)
    weights = ((sources * (norm.float() * query.float())).sum(-1) * scale).softmax(-1)
    mixed = (weights[..., None] * sources).sum(1)
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS) * out_norm.float()
    return normed.bfloat16(), last


def vllm_attn_res() -> types.FunctionType:
    """Import vLLM's kernel file alone, with stand-ins for the three modules that it asks for."""
    import triton
    import triton.language as tl

    class Platform:
        @staticmethod
        def is_device_capability_family(*_: object) -> bool:
            return False

        @staticmethod
        def is_arch_support_pdl() -> bool:
            return True

    made = {
        name: types.ModuleType(name)
        for name in ("vllm", "vllm._custom_ops", "vllm.platforms", "vllm.triton_utils")
    }
    vars(made["vllm"])["_custom_ops"] = made["vllm._custom_ops"]
    vars(made["vllm.platforms"])["current_platform"] = Platform
    vars(made["vllm.triton_utils"]).update(tl=tl, triton=triton)
    sys.modules.update(made)
    import vllm_attn_res

    return vllm_attn_res.attn_res
