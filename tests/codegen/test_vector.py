"""The shared vector arithmetic against float64."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tvm.script.ir_builder import IRBuilder

from k3c.codegen.templates.tvm import vector
from k3c.codegen.templates.tvm.vector import B, narrow, put, span
from k3c.ir.graph import Node
from k3c.targets.target import Target
from tests.support.kernel_runner import node, run

LANES = 8


@dataclass(frozen=True)
class Elementwise:
    """One function of vector.py over a row of f32, stored as f32 or bf16."""

    function: str
    name: str = "elementwise"

    def accepts(self, n: Node, target: Target) -> None:
        return None

    def layouts(self, n: Node, target: Target) -> dict[int, str]:
        return {}

    def constants(self, n: Node, target: Target) -> dict[str, Any]:
        out = n.results[0].type.dtype.name
        return {"n": n.operands[0].type.sizes[0], "out": out, "function": self.function}

    def scalars(self, n: Node) -> tuple[()]:
        return ()

    def workspace_bytes(self, n: Node, target: Target) -> int:
        return 0

    def build(self, constants: Any, target: Target) -> Any:
        n, out = constants["n"], constants["out"]
        with IRBuilder() as made, B.prim_func():
            pointers = [B.arg(name, B.handle()) for name in ("x", "y")]
            x = B.decl_buffer((n,), "float32", data=pointers[0])
            y = B.decl_buffer((n,), vector.storage(out), data=pointers[1])
            with B.serial(n // LANES) as i:
                at = span(i * LANES, LANES)
                value = x[at]
                if constants["function"] != "identity":
                    value = getattr(vector, constants["function"])(value, LANES)
                put(y, narrow(value, out, LANES), at)
        return made.get()


def apply(function: str, x: torch.Tensor, out: str = "f32") -> torch.Tensor:
    (y,) = run(Elementwise(function), node("elementwise", [x], [(out, len(x))]), [x])
    return y


def inputs() -> torch.Tensor:
    torch.manual_seed(0)
    small = 10.0 ** torch.linspace(-30, 1.9, 500)
    return torch.cat([small, -small, torch.linspace(-80, 80, 1000)]).float()


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        ("exp", torch.exp),
        ("expm1", torch.expm1),
        ("sigmoid", torch.sigmoid),
        ("tanh", torch.tanh),
    ],
)
def test_functions_are_accurate_to_float32(function: str, exact: Any) -> None:
    x = inputs()
    want = exact(x.double())
    # 1e-6 is about 8 units in the last place: a polynomial, a division and three roundings.
    assert ((apply(function, x).double() - want).abs() <= 1e-6 * want.abs()).all()


@pytest.mark.parametrize("function", ["exp", "expm1", "sigmoid", "tanh"])
def test_nan_stays_nan_and_infinities_reach_the_limits(function: str) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 0.0, -0.0, 1.0])
    y = apply(function, x)
    assert y[0].isnan()
    assert not y[1:].isnan().any()
    low = {"exp": 0.0, "expm1": -1.0, "sigmoid": 0.0, "tanh": -1.0}[function]
    assert torch.allclose(y[[2, 4]], torch.full((2,), low), atol=1e-30)
    if function in ("sigmoid", "tanh"):
        assert (y[[1, 3]] == 1.0).all()


def test_bf16_rounds_to_nearest_even_like_torch_and_keeps_nan() -> None:
    bits = torch.arange(0, 2**32, 2**16 // 4 + 1, dtype=torch.int64)[: 8 * (2**17)]
    x = (bits & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
    x = x[: len(x) // LANES * LANES]
    y = apply("identity", x, "bf16")
    want = x.bfloat16()
    nan = x.isnan()
    assert y[nan].isnan().all()
    assert torch.equal(y[~nan].view(torch.int16), want[~nan].view(torch.int16))
