"""The op registry: what every op takes, gives and requires.

Operand order is the contract between the model's ops, the passes and the kernels. Dimensions of the
signatures: T rows, B segments, S state slots, P pages (of MLA) or channels (of KDA), M pages of a
request, D hidden, N/K rows and columns of a weight, E experts, k experts of a token, NB bank rows.
A is the activation dtype, W the stored dtype of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from k3c.ir.graph import Node, Value
from k3c.ir.op_spec import AttrSpec, Level, OpSpec, epilogues
from k3c.ir.signature import FLOATS, Binding, parse_signature
from k3c.ir.types import Dim, SymDim

__all__ = ["COLLECTIVES", "OPS", "epilogues", "rank_multiple"]


def _column_ranges(node: Node, binding: Binding) -> str | None:
    """Check that the results are column ranges of the GEMM, in order."""
    words = epilogues(node)
    if len(words) != len(node.results):
        return f"{len(words)} epilogues for {len(node.results)} results"
    if "situ" in words and not {"beta", "linear_beta"} <= node.attrs.keys():
        return "epilogue situ needs attributes beta and linear_beta"
    grouped = node.op in ("grouped_linear", "grouped_gemm")
    rows = node.operands[-1].type.shape if grouped else (binding.dims["T"],)
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
    has_addend = len(node.operands) == len(OPS[node.op].roles)
    if has_addend and (len(node.results) != 1 or epilogues(node) != ("none",)):
        return "an addend needs a single result without epilogue"
    return _column_ranges(node, binding)


def _one_message(node: Node, binding: Binding) -> str | None:
    """Check that every operand of a reduction comes back with its own type."""
    found, wanted = ([v.type for v in side] for side in (node.results, node.operands))
    return None if found == wanted else f"{len(found)} results, expected the operands' types"


def _gathered(node: Node, binding: Binding) -> str | None:
    """Check that the result is the operand behind a dimension that counts the ranks."""
    part, whole = node.operands[0].type, node.results[0].type
    same = whole.dtype == part.dtype and whole.shape[1:] == part.shape
    ranks = whole.shape[0] if whole.shape else 0
    if len(node.results) != 1 or not same or not isinstance(ranks, int):
        return f"%{node.results[0].name} is {whole}, expected [ranks, ...] of {part}"
    return None


def _exchanged(node: Node, binding: Binding) -> str | None:
    """Check that the results are the operands with the rows of all ranks."""
    return _rows_of_ranks(node.operands, node.results)


def _returned(node: Node, binding: Binding) -> str | None:
    """Check that the result is the operand with the rows of one rank."""
    return _rows_of_ranks(node.results, node.operands)


def _rows_of_ranks(own: tuple[Value, ...], of_all: tuple[Value, ...]) -> str | None:
    """Check that values differ in the number of rows alone, by one factor."""
    if len(own) != len(of_all):
        return f"{len(of_all)} values with the rows of all ranks for {len(own)} of one"
    for one, every in zip(own, of_all, strict=True):
        same = one.type.dtype == every.type.dtype and one.type.shape[1:] == every.type.shape[1:]
        if not same or rank_multiple(one.type.shape[0], every.type.shape[0]) is None:
            return f"%{one.name} is {one.type}, %{every.name} with the rows of all {every.type}"
    return None


def rank_multiple(own: Dim, of_all: Dim) -> int | None:
    """Return how many times a dimension goes into another one; None: not a whole number."""
    sizes = [d.times if isinstance(d, SymDim) else d for d in (own, of_all)]
    symbols = [replace(d, times=1) if isinstance(d, SymDim) else None for d in (own, of_all)]
    if symbols[0] != symbols[1] or sizes[1] % sizes[0]:
        return None
    return sizes[1] // sizes[0]


def _mapped(node: Node, binding: Binding) -> str | None:
    """Check that experts are found by a map, or by the first expert of the rank."""
    if OPS[node.op].roles[len(node.operands) - 1] == "expert_map" and "first_expert" in node.attrs:
        return "a map and first_expert: which experts are local is said twice"
    return None


def _joined(node: Node, binding: Binding) -> str | None:
    """Check that the result's columns are those of all parts; the last part may be padded."""
    whole, rows = node.results[0].type, binding.dims["T"]
    parts, columns = binding.dims["R"], binding.dims["N"]
    sized = isinstance(parts, int) and isinstance(columns, int) and len(node.results) == 1
    most = int(str(parts)) * int(str(columns)) if sized else 0
    if len(whole.shape) != 2 or whole.shape[0] != rows or whole.dtype != binding.dtypes["A"]:
        return f"%{node.results[0].name} is {whole}, expected {rows} rows"
    width = whole.shape[1]
    fits = isinstance(width, int) and 0 < width <= most
    return None if fits else f"{width} columns of {parts} parts of {columns}"


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

# The experts of this rank; 0 of them: all.
_FIRST_EXPERT = {"first_expert": AttrSpec("layer", 0)}
_LOCAL_EXPERTS = {"num_experts": AttrSpec("int", 0), **_FIRST_EXPERT}
# The experts of all ranks, for estimates; 0: those of the weight.
_TOTAL_EXPERTS = {"total_experts": AttrSpec("int", 0)}
_ROUTE = {"k": _INT, "renormalize": AttrSpec("bool"), "scale": _FLOAT}
_KDA = {
    "heads": _INT,
    "lower_bound": _FLOAT_OR_NONE,
    "scale": _FLOAT,
    "l2_eps": _FLOAT,
    "chunk": _INT,
    **_EPS,
}
_LINEAR = {"epilogues": AttrSpec("epilogues", ()), **_SITU}
# G is the dtype of the recurrent state: f32, or bf16 where a target's plan says so.
_KDA_POOLS = "conv_state: A[S, J-1, 3*P], kda_state: G[S, heads, K, V]"
_KDA_STATE = f"{_KDA_POOLS}, {_SLOTS}"
_KDA_RESULTS = "A[T, heads*V], A[S, J-1, 3*P], G[S, heads, K, V]"
_KDA_FB = (
    "q: A[T, P], k: A[T, P], v: A[T, P], z: A[T, P], f_a: A[T, F], b: A[T, heads],"
    f" {_CONV}, a_log: f32[heads], dt_bias: f32[P], o_norm: f32[V], f_b: W[P, F]"
)

_TABLE = (
    _op(
        "embed", "both", "ids: i32[T], table: W[V, D] -> A[T, D]",
        {"first_row": AttrSpec("layer", 0)},
    ),
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
        "norm_columns", "both", "x: A[T, D], w: f32[D] -> A[T, columns]",
        {"columns": _INT, "first_column": _LAYER, **_EPS},
    ),
    _op(
        "linear", "both", "x: A[T, K], w: W[N, K], addend?: A[T, N] -> ...",
        _LINEAR, extra=_addend,
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
        {**_ROUTE, **_LOCAL_EXPERTS},
    ),
    _op(
        "map_experts", "both",
        "weights: f32[T, k], experts: i32[T, k], expert_map?: i32[E, C] -> f32[T, k], i32[T, k]",
        {"num_experts": _INT, **_FIRST_EXPERT}, extra=_mapped,
    ),
    _op(
        "grouped_linear", "model",
        "x: A[T, K] | A[T, k, K], w: mxfp4[E, N, K], experts: i32[T, k] -> ...",
        {**_FIRST_EXPERT, **_TOTAL_EXPERTS}, extra=_column_ranges,
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
        f" {_CONV}, a_log: f32[heads], dt_bias: f32[P], o_norm: f32[V], {_KDA_STATE}"
        f" -> {_KDA_RESULTS}",
        _KDA, in_place={1: 12, 2: 13},
    ),
    _op(
        "kda_fb", "kernel", f"{_KDA_FB}, {_KDA_STATE} -> {_KDA_RESULTS}",
        _KDA, in_place={1: 13, 2: 14},
    ),
    _op(
        "kda_verify", "kernel",
        f"{_KDA_FB}, {_KDA_POOLS}, rec_k: f32[S, width, heads, K], rec_g: f32[S, width, heads, K],"
        f" rec_u: f32[S, width, heads, V], rec_conv: A[S, width, 3*P], {_SLOTS} -> A[T, heads*V],"
        " f32[S, width, heads, K], f32[S, width, heads, K], f32[S, width, heads, V],"
        " A[S, width, 3*P]",
        {**_KDA, "width": _INT}, in_place={1: 15, 2: 16, 3: 17, 4: 18},
    ),
    _op(
        "kda_fold", "kernel",
        "conv_state: A[S, 3, C], kda_state: G[S, H, K, V], rec_k: f32[S, W, H, K],"
        " rec_g: f32[S, W, H, K], rec_u: f32[S, W, H, V], rec_conv: A[S, W, C], slots: i32[B],"
        " accepted: i32[B] -> A[S, 3, C], G[S, H, K, V]",
        {}, in_place={0: 0, 1: 1},
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
        {"num_experts": _INT, **_FIRST_EXPERT},
    ),
    _op(
        "route_dispatch", "kernel",
        "logits: f32[T, E], bias: f32[E], expert_map?: i32[E, C]"
        " -> f32[T, k], i32[num_experts+1], i32[T, k]",
        {**_ROUTE, "num_experts": _INT, **_FIRST_EXPERT}, extra=_mapped,
    ),
    _op(
        "grouped_gemm", "kernel",
        "x: A[T, K] | A[T, k, K], w: mxfp4[E, N, K], offsets: i32[E+1], order: i32[T, k] -> ...",
        {"epilogue": AttrSpec("epilogue", "none"), **_SITU, **_TOTAL_EXPERTS},
        extra=_column_ranges,
    ),
    _op(
        "combine_norm", "kernel",
        "rows: A[T, k, L], weights: f32[T, k], norm: f32[L] -> A[T, L]", _EPS,
    ),
    _op(
        "norm_linear", "kernel",
        "x: A[T, K], norm: f32[K], w: W[N, K], addend?: A[T, N] -> ...",
        {**_LINEAR, **_EPS}, extra=_addend,
    ),
    _op(
        "all_reduce", "both", "x: A[*S], y?: B[*U] -> ...", {"axis": AttrSpec("axis")},
        extra=_one_message,
    ),
    _op(
        "all_gather", "both", "x: A[*S] -> ...", {"axis": AttrSpec("axis")}, extra=_gathered,
    ),
    _op(
        "dispatch_tokens", "both", "x: A[T, L], weights: f32[T, k], experts: i32[T, k] -> ...",
        {"axis": AttrSpec("axis")}, extra=_exchanged,
    ),
    _op("combine_tokens", "both", "x: A[T, L] -> ...", {"axis": AttrSpec("axis")}, extra=_returned),
    _op("join_columns", "both", "x: A[R, T, N] -> ...", {}, extra=_joined),
    _op(
        "advance", "kernel",
        "tokens: i32[B], ids: i32[T], context: i32[B], seg_tokens: i32[B], position: i32[B]"
        " -> i32[T], i32[B], i32[B]",
        {}, in_place={0: 1, 1: 2, 2: 4}, updates_io=True,
    ),
)  # fmt: skip

# Done by the runtime between ranks: no kernel template implements them.
COLLECTIVES = ("all_reduce", "all_gather", "dispatch_tokens", "combine_tokens")

OPS: Mapping[str, OpSpec] = {spec.name: spec for spec in _TABLE}
