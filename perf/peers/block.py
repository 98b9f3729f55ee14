"""One KDA + LatentMoE layer of a TP16 rank without its routed experts, in plain torch, compiled.

The experts are Marlin's (moe.py); the reductions between ranks are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from perf.peers.case import Case, random_bf16, random_f32

HEADS, DIM, WIDTH, EXPERTS, LATENT, TOP, LAYERS, SOURCES = 6, 128, 7168, 896, 3584, 16, 4, 4
QKV = 3 * HEADS * DIM
SHAPES: Mapping[str, tuple[int, int]] = {
    "qkvg": (QKV + HEADS * DIM, WIDTH),
    "fa_beta": (224, WIDTH),
    "fb": (HEADS * DIM, DIM),
    "o": (WIDTH, HEADS * DIM),
    "router": (EXPERTS, WIDTH),
    "down": (LATENT, WIDTH),
    "up": (WIDTH, LATENT),
    "shared_in": (768, WIDTH),
    "shared_out": (WIDTH, 384),
}
Weights = Mapping[str, torch.Tensor]
ROWS = (1, 8)
LIBRARIES: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    """Yield the layer as torch.compile makes it, and max-autotune."""
    layers = [_weights() for _ in range(LAYERS)]
    nbytes = 2.0 * sum(rows * columns for rows, columns in SHAPES.values())
    for rows in ROWS:
        x = random_bf16(rows, WIDTH)
        states = [_state(rows) for _ in range(LAYERS)]
        total = nbytes + rows * HEADS * 2 * 4 * DIM * DIM
        for mode in ("default", "max-autotune-no-cudagraphs"):
            torch._dynamo.reset()
            run = torch.compile(layer, dynamic=False, mode=None if mode == "default" else mode)
            calls = [
                lambda x=x, s=s, w=w, f=run: f(x, *s, w)
                for s, w in zip(states, layers, strict=True)
            ]
            yield Case(
                "layer", f"KDA + MoE without experts m{rows}", f"torch.compile {mode}", calls, total
            )


def _weights() -> Weights:
    dense = {name: random_bf16(*shape, scale=0.02) for name, shape in SHAPES.items()}
    return dense | {
        "query": random_f32(WIDTH, scale=0.02),
        "norm": random_bf16(WIDTH),
        "latent_norm": random_bf16(LATENT),
        "conv": random_f32(QKV, 4, scale=0.3),
        "decay": random_f32(HEADS),
        "dt": random_f32(HEADS, DIM),
        "bias": random_f32(EXPERTS),
    }


def _state(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    snapshots = random_bf16(rows, SOURCES, WIDTH)
    return snapshots, torch.zeros(rows, HEADS, DIM, DIM, device="cuda"), random_bf16(rows, QKV, 3)


def layer(
    x: torch.Tensor, snapshots: torch.Tensor, state: torch.Tensor, tail: torch.Tensor, w: Weights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the layer; `state` and `tail` are updated in place.

    Args:
        x: bf16[T, 7168].
        snapshots: bf16[T, 4, 7168], of AttnRes.
        state: f32[T, 6, 128, 128].
        tail: bf16[T, 2304, 3], the convolution's last columns.
        w: The layer's weights.

    Returns:
        bf16[T, 7168], and the chosen experts i64[T, 16] with their gates f32[T, 16].
    """
    x = x + kda(attn_res(x, snapshots, w), state, tail, w)
    y = attn_res(x, snapshots, w)
    scores = torch.sigmoid(F.linear(y, w["router"]).float())
    experts = torch.topk(scores + w["bias"], TOP, dim=-1).indices
    gates = scores.gather(-1, experts)
    latent = rms(F.linear(y, w["down"]), w["latent_norm"])
    shared = F.linear(situ(F.linear(y, w["shared_in"])), w["shared_out"])
    routed = F.linear(latent, w["up"])
    return x + routed + shared, experts, gates / gates.sum(-1, keepdim=True)


def kda(x: torch.Tensor, state: torch.Tensor, tail: torch.Tensor, w: Weights) -> torch.Tensor:
    """Return the attention's output bf16[T, 7168]."""
    rows = x.shape[0]
    fused, small = F.linear(x, w["qkvg"]), F.linear(x, w["fa_beta"])
    window = torch.cat((tail, fused[:, :QKV, None]), -1)
    tail.copy_(window[..., 1:])
    q, k, v = F.silu((window * w["conv"]).sum(-1)).view(rows, 3, HEADS, DIM).unbind(1)
    q, k = unit(q) * DIM**-0.5, unit(k)
    forget = F.linear(small[:, :DIM], w["fb"]).float().view(rows, HEADS, DIM) + w["dt"]
    decay = torch.exp(-5.0 * torch.sigmoid(w["decay"].exp()[:, None] * forget))
    beta = torch.sigmoid(small[:, DIM : DIM + HEADS].float())[..., None]
    kept = state * decay[..., None]
    delta = beta * (v - (kept * k[..., None]).sum(-2))
    new = kept + k[..., None] * delta[..., None, :]
    state.copy_(new)
    out = unit_rms((new * q[..., None]).sum(-2))
    gated = out * torch.sigmoid(fused[:, QKV:].float().view(rows, HEADS, DIM))
    return F.linear(gated.bfloat16().view(rows, -1), w["o"])


def attn_res(x: torch.Tensor, snapshots: torch.Tensor, w: Weights) -> torch.Tensor:
    """Return the normed mix of the snapshots and x, bf16[T, 7168]."""
    sources = torch.cat((snapshots, x[:, None]), 1).float()
    scores = (sources * w["query"]).sum(-1) * torch.rsqrt(sources.square().mean(-1) + 1e-6)
    mixed = (scores.softmax(-1)[..., None] * sources).sum(1)
    return rms(mixed.bfloat16(), w["norm"])


def situ(x: torch.Tensor) -> torch.Tensor:
    """Return SiTU of gate and up halves, beta 4 and 25."""
    gate, up = x.float().chunk(2, -1)
    soft = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate)
    return (soft * 25.0 * torch.tanh(up / 25.0)).bfloat16()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of rows, in bf16."""
    return unit_rms(x.float()).bfloat16() * weight


def unit_rms(x: torch.Tensor) -> torch.Tensor:
    """Return rows scaled to a mean square of 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return rows scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
