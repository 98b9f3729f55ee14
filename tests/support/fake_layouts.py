"""Templates that only name layouts, for the layout pass."""

from __future__ import annotations

from dataclasses import dataclass

from k3c.ir.graph import Node
from k3c.ir.refusal import Refusal
from k3c.targets.catalogue import Catalogue
from k3c.targets.target import load_target

TARGET = load_target("cpu-avx2")


@dataclass(frozen=True)
class FakeTemplate:
    """Packs operand 1 of one op; refuses above `max_rows` rows."""

    op: str
    layout: str
    max_rows: int = 1 << 30

    @property
    def name(self) -> str:
        return f"{self.op}_{self.layout}"

    def accepts(self, node: Node, target: object) -> Refusal | None:
        rows = node.results[0].type.sizes[0]
        return None if rows <= self.max_rows else Refusal("too many rows", rows)

    def layouts(self, node: Node, target: object) -> dict[int, str]:
        return {1: self.layout} if self.layout else {}


def catalogue(name: str) -> Catalogue:
    """Return a catalogue by the name that a case gives it."""
    templates = {
        "": (),
        "packed": (FakeTemplate("grouped_gemm", "mx32.v8"), FakeTemplate("linear", "panel.v8"),
                   FakeTemplate("rms_norm", "")),
        "by_bucket": (FakeTemplate("grouped_gemm", "mx32.gemv", 4),
                      FakeTemplate("grouped_gemm", "mx32.gemm")),
        "clash": (FakeTemplate("grouped_gemm", "mx32.v8"), FakeTemplate("linear", "panel.v8"),
                  FakeTemplate("embed", "rows.v8")),
        "fused": tuple(FakeTemplate(op, "") for op in
                       ("kda_fb", "route_dispatch", "norm_linear", "advance")),
        "ranks": (FakeTemplate("grouped_gemm", "mx32.v8"), *(FakeTemplate(op, "") for op in
                  ("kda_fb", "route_dispatch", "norm_linear", "advance", "linear"))),
    }  # fmt: skip
    return Catalogue(templates[name])  # pyright: ignore[reportArgumentType]
