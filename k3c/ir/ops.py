"""The op registry: what every op takes, gives and requires.

Operand order is the contract between the model's ops, the passes and the kernels. Dimensions of the
signatures: T rows, B segments, S state slots, P pages (of MLA) or channels (of KDA), M pages of a
request, D hidden, N/K rows and columns of a weight, E experts, k experts of a token, NB bank rows.
A is the activation dtype, W the stored dtype of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from k3c.ir.graph import Attr, LayerAttr, Node
from k3c.ir.signature import (
    FLOATS,
    Binding,
    Signature,
    bind_types,
    infer_type,
    integer_attrs,
    parse_signature,
)
from k3c.ir.types import TensorType

Level = Literal["model", "kernel", "both"]
AttrKind = Literal["int", "float", "bool", "float?", "layer", "epilogue", "epilogues"]
EPILOGUES = ("none", "situ")


@dataclass(frozen=True)
class AttrSpec:
    """An attribute's kind; with a default it may be missing and then means the default.

    Kinds: `float?` is a float or the word none; `layer` an integer or a LayerAttr; `epilogue` a
    word of EPILOGUES; `epilogues` one such word for each result.
    """

    kind: AttrKind
    default: Attr | None = None

    def check(self, value: Attr) -> str | None:
        """Return what is wrong with a value, or None."""
        return None if _KINDS[self.kind](value) else f"{value} is not of kind {self.kind}"

    def is_default(self, value: Attr) -> bool:
        """Whether a value means the same as a missing attribute."""
        if self.kind == "epilogues" and isinstance(value, tuple):
            return all(word == "none" for word in value)
        return self.default is not None and value == self.default


@dataclass(frozen=True)
class Problem:
    """What is wrong with a node; `operand` is the index of the guilty operand, if it is one."""

    what: str
    operand: int | None = None


Extra = Callable[[Node, Binding], str | None]


@dataclass(frozen=True)
class OpSpec:
    """One op.

    Attributes:
        name: Its name.
        signature: Operand roles and shape rule.
        attrs: Its attributes by name.
        level: `model`: passes must replace it before kernels are chosen.
        in_place: Result index -> operand index that the result overwrites.
        commutative: The first two operands may change places.
        extra: A check that the signature cannot say; it sees the bound variables.
    """

    name: str
    signature: Signature
    attrs: Mapping[str, AttrSpec]
    level: Level
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    commutative: bool = False
    extra: Extra | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the operands in order, the optional ones too."""
        return tuple(port.name for port in self.signature.operands)

    def check(self, node: Node) -> Problem | None:
        """Return what is wrong with a node of this op: attributes, arity, types; or None."""
        problem = self._check_attrs(node) or self._check_arity(node)
        if problem:
            return Problem(problem)
        binding = Binding(integer_attrs(node.attrs))
        ports = self.signature.operands[: len(node.operands)]
        wrong = bind_types(ports, [v.type for v in node.operands], binding)
        if wrong:
            return Problem(wrong[1], wrong[0])
        if not self.signature.open_results:
            wrong = bind_types(self.signature.results, [v.type for v in node.results], binding)
        what = wrong[1] if wrong else self.extra(node, binding) if self.extra else None
        return Problem(what) if what else None

    def infer(
        self, operands: tuple[TensorType, ...], attrs: Mapping[str, Attr]
    ) -> tuple[TensorType, ...] | None:
        """Return the result types; None where the operands leave a dtype or a width open."""
        binding = Binding(integer_attrs(attrs))
        ports = self.signature.operands[: len(operands)]
        if self.signature.open_results or bind_types(ports, operands, binding):
            return None
        found = [infer_type(port, binding) for port in self.signature.results]
        types = tuple(t for t in found if t is not None)
        return types if len(types) == len(found) else None

    def _check_attrs(self, node: Node) -> str | None:
        for name, value in node.attrs.items():
            if name not in self.attrs:
                known = ", ".join(self.attrs) or "none"
                return f"attribute {name} is unknown; {self.name} takes {known}"
            problem = self.attrs[name].check(value)
            if problem:
                return f"attribute {name}: {problem}"
        required = {n for n, s in self.attrs.items() if s.default is None}
        missing = sorted(required - node.attrs.keys())
        return f"attribute {missing[0]} is missing" if missing else None

    def _check_arity(self, node: Node) -> str | None:
        ports, results = self.signature.operands, self.signature.results
        most, least = len(ports), sum(not p.optional for p in ports)
        if not least <= len(node.operands) <= most:
            wanted = str(most) if least == most else f"{least} to {most}"
            roles = ", ".join(self.roles)
            return f"{len(node.operands)} operands, expected {wanted}: {roles}"
        if not self.signature.open_results and len(node.results) != len(results):
            return f"{len(node.results)} results, expected {len(results)}"
        return None if node.results else "no results"


def _is_epilogue(value: Attr) -> bool:
    return isinstance(value, str) and value in EPILOGUES


_KINDS: Mapping[AttrKind, Callable[[Attr], bool]] = {
    "int": lambda v: type(v) is int,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "float?": lambda v: type(v) is float or v == "none",
    "layer": lambda v: type(v) is int or isinstance(v, LayerAttr),
    "epilogue": _is_epilogue,
    "epilogues": lambda v: isinstance(v, tuple) and all(map(_is_epilogue, v)),
}


def epilogues(node: Node) -> tuple[str, ...]:
    """Return the epilogue of each result of a linear or grouped_gemm."""
    words = node.attrs.get("epilogues", node.attrs.get("epilogue", "none"))
    if isinstance(words, tuple) and words:
        return tuple(map(str, words))
    return (str(words or "none"),) * len(node.results)


def _column_ranges(node: Node, binding: Binding) -> str | None:
    """Check that the results are column ranges of the GEMM, in order."""
    words = epilogues(node)
    if len(words) != len(node.results):
        return f"{len(words)} epilogues for {len(node.results)} results"
    if "situ" in words and not {"beta", "linear_beta"} <= node.attrs.keys():
        return "epilogue situ needs attributes beta and linear_beta"
    rows = node.operands[-1].type.shape if node.op != "linear" else (binding.dims["T"],)
    used = 0
    for word, result in zip(words, node.results, strict=True):
        *lead, width = result.type.shape
        if tuple(lead) != rows or not isinstance(width, int):
            expected = ", ".join([*map(str, rows), "N"])
            return f"%{result.name} is {result.type}, expected [{expected}]"
        if result.type.dtype not in FLOATS:
            return f"%{result.name} is {result.type.dtype}, expected a float dtype"
        used += 2 * width if word == "situ" else width
    if used != binding.dims["N"]:
        return f"the results take {used} weight rows, the weight has {binding.dims['N']}"
    return None


def _addend(node: Node, binding: Binding) -> str | None:
    if len(node.operands) == 3 and (len(node.results) != 1 or epilogues(node) != ("none",)):
        return "an addend needs a single result without epilogue"
    return _column_ranges(node, binding)


def _latent_fits(node: Node, binding: Binding) -> str | None:
    """Check that a cached row holds the latent: r <= r + dr."""
    latent, row = binding.dims.get("r", 0), binding.dims.get("C", 0)
    fits = isinstance(latent, int) and isinstance(row, int) and latent <= row
    return None if fits else f"the latent has {latent} elements, a cached row {row}"


def _op(
    name: str, level: Level, signature: str, attrs: Mapping[str, AttrSpec], **more: object
) -> OpSpec:
    return OpSpec(name, parse_signature(signature), attrs, level, **more)  # pyright: ignore


_INT, _FLOAT, _LAYER = AttrSpec("int"), AttrSpec("float"), AttrSpec("layer")
_FLOAT_OR_NONE, _EPS = AttrSpec("float?"), {"eps": AttrSpec("float")}
_SITU = {"beta": AttrSpec("float", 0.0), "linear_beta": AttrSpec("float?", "none")}
_MLA_DIMS = {"heads": _INT, "nope_dim": _INT, "v_dim": _INT}
_SLOTS = "seg_start: i32[B], seg_tokens: i32[B], slots: i32[B], context: i32[B]"
_PAGES = "seg_start: i32[B], seg_tokens: i32[B], context: i32[B], page_table: i32[B, M]"
_CONV = "conv_q: f32[P, J], conv_k: f32[P, J], conv_v: f32[P, J]"
_SAMPLING = (
    "temperature: f32[B], top_k: i32[B], top_p: f32[B], min_p: f32[B], seed: i64[B],"
    " position: i32[B]"
)

_TABLE = (
    _op("embed", "both", "ids: i32[T], table: W[V, D] -> A[T, D]", {}),
    _op("cast", "model", "x: X[*S] -> Y[*S]", {}),
    _op(
        "residual_join", "model", "prefix: A[T, D], delta: A[T, D] -> A[T, D]",
        {"restart": _LAYER},
    ),
    _op(
        "attn_res", "model",
        "prefix: A[T, D], bank: A[NB, T, D], res_norm: f32[D], res_proj: f32[1, D] -> A[T, D]",
        {"rows": _LAYER, **_EPS},
    ),
    _op(
        "bank_commit", "model", "bank: A[NB, T, D], prefix: A[T, D] -> A[NB, T, D]",
        {"row": _LAYER},
    ),
    _op("rms_norm", "both", "x: A[T, D], w: f32[D] -> A[T, D]", _EPS),
    _op(
        "linear", "both", "x: A[T, K], w: W[N, K], addend?: A[T, N] -> ...",
        {"epilogues": AttrSpec("epilogues", ()), **_SITU}, extra=_addend,
    ),
    _op(
        "short_conv", "model",
        f"q: A[T, P], k: A[T, P], v: A[T, P], {_CONV}, conv_state: A[S, J-1, 3*P], {_SLOTS}"
        " -> A[T, P], A[T, P], A[T, P], A[S, J-1, 3*P]",
        {},
    ),
    _op(
        "l2_norm", "model", "x: A[T, P] -> f32[T, P]",
        {"heads": _INT, "scale": _FLOAT, **_EPS},
    ),
    _op(
        "kda_gate", "model", "f: A[T, P], a_log: f32[H], dt_bias: f32[P] -> f32[T, P]",
        {"lower_bound": _FLOAT_OR_NONE},
    ),
    _op(
        "kda_recurrence", "model",
        "q: f32[T, H*K], k: f32[T, H*K], v: A[T, H*V], g: f32[T, H*K], b: A[T, H],"
        f" kda_state: f32[S, H, K, V], {_SLOTS} -> A[T, H*V], f32[S, H, K, V]",
        {"chunk": _INT},
    ),
    _op(
        "gated_rms_norm", "model",
        "o: A[T, heads*V], w: f32[V], z: A[T, heads*V] -> A[T, heads*V]",
        {"heads": _INT, **_EPS},
    ),
    _op(
        "mla_append", "both",
        f"kv: A[T, C], norm: f32[r], kv_cache: A[P, page, C], {_PAGES} -> A[P, page, C]",
        _EPS, in_place={0: 2}, extra=_latent_fits,
    ),
    _op(
        "mla_attention", "model",
        "q: A[T, heads*(nope_dim+C-r)], kv_b: W[heads*(nope_dim+v_dim), r],"
        f" kv_cache: A[P, page, C], {_PAGES} -> A[T, heads*v_dim]",
        _MLA_DIMS, extra=_latent_fits,
    ),
    _op("sigmoid_mul", "both", "a: A[*S], z: A[*S] -> A[*S]", {}),
    _op(
        "situ", "both", "gate: A[*S], up: A[*S] -> A[*S]",
        {"beta": _FLOAT, "linear_beta": _FLOAT_OR_NONE},
    ),
    _op(
        "route_topk", "both", "logits: f32[T, E], bias: f32[E] -> f32[T, k], i32[T, k]",
        {"k": _INT, "renormalize": AttrSpec("bool"), "scale": _FLOAT},
    ),
    _op(
        "grouped_linear", "model",
        "x: A[T, K] | A[T, k, K], w: mxfp4[E, N, K], experts: i32[T, k] -> ...",
        {}, extra=_column_ranges,
    ),
    _op("combine", "both", "rows: A[T, k, L], weights: f32[T, k] -> A[T, L]", {}),
    _op("add", "both", "a: A[*S], b: A[*S] -> A[*S]", {}, commutative=True),
    _op("gather_rows", "both", "x: A[T, D], index: i32[B] -> A[B, D]", {}),
    _op("sample", "both", f"logits: f32[B, V], {_SAMPLING} -> i32[B]", {}),
    _op("token_logprob", "both", "logits: f32[T, V], targets: i32[T] -> f32[T]", {}),
    _op(
        "attn_res_norm", "kernel",
        "prefix: A[T, D], delta: A[T, D], bank: A[NB, T, D], res_norm: f32[D],"
        " res_proj: f32[1, D], norm: f32[D] -> A[T, D], A[T, D], A[NB, T, D]",
        {"restart": _LAYER, "rows": _LAYER, "commit_row": _LAYER, "res_eps": _FLOAT, **_EPS},
        in_place={0: 0, 2: 2},
    ),
    _op(
        "kda", "kernel",
        "q: A[T, P], k: A[T, P], v: A[T, P], z: A[T, P], f: A[T, P], b: A[T, heads],"
        f" {_CONV}, a_log: f32[heads], dt_bias: f32[P], o_norm: f32[V],"
        f" conv_state: A[S, J-1, 3*P], kda_state: f32[S, heads, K, V], {_SLOTS}"
        " -> A[T, heads*V], A[S, J-1, 3*P], f32[S, heads, K, V]",
        {
            "heads": _INT, "lower_bound": _FLOAT_OR_NONE, "scale": _FLOAT, "l2_eps": _FLOAT,
            "chunk": _INT, **_EPS,
        },
        in_place={1: 12, 2: 13},
    ),
    _op(
        "mla_absorb_q", "kernel",
        "q: A[T, Q], kv_b: W[heads*(nope_dim+v_dim), r] -> f32[T, heads, Q//heads-nope_dim+r]",
        _MLA_DIMS,
    ),
    _op(
        "mla_attend", "kernel",
        f"q_lat: f32[T, n, C], kv_cache: A[P, page, C], {_PAGES} -> f32[T, n, latent_dim]",
        {"scale": _FLOAT, "latent_dim": _INT},
    ),
    _op(
        "mla_absorb_v", "kernel",
        "o_lat: f32[T, heads, r], kv_b: W[heads*(nope_dim+v_dim), r], z?: A[T, heads*v_dim]"
        " -> A[T, heads*v_dim]",
        _MLA_DIMS,
    ),
    _op(
        "dispatch", "kernel", "experts: i32[T, k] -> i32[num_experts+1], i32[T, k]",
        {"num_experts": _INT},
    ),
    _op(
        "grouped_gemm", "kernel",
        "x: A[T, K] | A[T, k, K], w: mxfp4[E, N, K], offsets: i32[E+1], order: i32[T, k] -> ...",
        {"epilogue": AttrSpec("epilogue", "none"), **_SITU}, extra=_column_ranges,
    ),
    _op(
        "combine_norm", "kernel",
        "rows: A[T, k, L], weights: f32[T, k], norm: f32[L] -> A[T, L]", _EPS,
    ),
)  # fmt: skip

OPS: Mapping[str, OpSpec] = {spec.name: spec for spec in _TABLE}
