"""What the KDA templates read off a node: refusals, constexprs, bytes."""

from __future__ import annotations

from typing import Any

from k3c.codegen.template import operand_bytes, refuse_dtype, result_bytes
from k3c.ir.graph import Node
from k3c.ir.ops import OPS
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Cost

TAPS = 4  # the convolution's width; its state holds TAPS - 1 raw rows
MAX_HEAD_DIM = 128


def operand(node: Node, role: str) -> Any:
    """Return the type of the operand with a role of the op's signature."""
    return node.operands[OPS[node.op].roles.index(role)].type


def refuse_kda(node: Node) -> Refusal | None:
    """Return why no KDA kernel here implements a kda_fb or kda_verify node, or None."""
    _, _, key, value = operand(node, "kda_state").sizes
    if key != value or key > MAX_HEAD_DIM:
        limit = f"kda kernels take keys and values of one width up to {MAX_HEAD_DIM}"
        return Refusal(limit, f"{key} and {value}")
    taps = operand(node, "conv_q").sizes[1]
    if taps != TAPS:
        return Refusal(f"kda kernels convolve over {TAPS} tokens", str(taps))
    roles = OPS[node.op].roles
    state, forget = roles.index("kda_state"), roles.index("f_b")
    return (
        refuse_dtype(node, 0, ("bf16", "f32"))
        or refuse_dtype(node, state, ("f32", "bf16"))
        or refuse_dtype(node, forget, ("bf16", "f32"))
    )


def kda_constexprs(node: Node) -> dict[str, Any]:
    """Return the constexprs that describe a kda_fb or kda_verify node."""
    _, heads, key, _ = operand(node, "kda_state").sizes
    return {
        "H": heads,
        "K": key,
        "F": operand(node, "f_a").sizes[1],
        "LOWER_BOUND": node.attrs["lower_bound"],
        "SCALE": node.attrs["scale"],
        "L2_EPS": node.attrs["l2_eps"],
        "EPS": node.attrs["eps"],
    }


def kda_cost(node: Node, pools: tuple[str, ...], flops: int) -> Cost:
    """Return the cost when every segment is live; of pools by slot only its slots are touched.

    Args:
        node: The node.
        pools: Roles of the operands that lie by slot.
        flops: Operations of the launch.
    """
    segments = operand(node, "slots").sizes[0]
    slots = operand(node, pools[0]).sizes[0]
    roles = OPS[node.op].roles
    changed = {roles[i] for i in OPS[node.op].in_place.values()}

    def unused(names: set[str]) -> int:
        whole = sum(operand(node, role).nbytes for role in names)
        return whole - whole * segments // slots

    read = operand_bytes(node) - unused(set(pools))
    write = result_bytes(node) - unused(set(pools) & changed)
    return Cost(read, write, flops)
