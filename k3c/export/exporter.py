"""Export the text model: every block kind once, on the meta device, to one Module.

No weight is read or allocated: 93 layers are three graphs, and a parameter is a shape. What
differs between layers goes into the schedule as layer attributes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from k3c.errors import ExportError, K3CError
from k3c.export.importer import ImportSpec, Port, import_program
from k3c.ir.graph import Call, Graph, Module, Role
from k3c.ir.types import BF16, F32, I32, I64, DType, SymDim, TensorType
from k3c.model.block import make_block
from k3c.model.config import PAGE_TOKENS, TextConfig
from k3c.model.ends import Head, Prologue, ScoreHead
from k3c.model.layers import retype_weights
from k3c.model.options import ModelOptions
from k3c.model.tensor_names import LM_HEAD, MODEL

Compute = Literal["bf16", "f32"]
WeightDType = Callable[[str], DType]

T = SymDim("T", 1, 16384)  # rows of a step
B = SymDim("B", 1, 1024)  # segments of a step, one per request
S = SymDim("S", 2, 65536)  # state slots; slot 0 is scratch
P = SymDim("P", 2, 1 << 24)  # pages; page 0 is scratch
M = SymDim("M", 1, 65536)  # pages of one request
DIMS = (T, B, S, P, M)
# Sizes while tracing: all different, none 0 or 1, and no size that the model compares with.
_EXAMPLE = {"T": 1009, "B": 811, "S": 613, "P": 419, "M": 211}
_ROLES: Mapping[str, Role] = {
    "prefix": "carry",
    "pending": "carry",
    "bank": "carry",
    "conv_state": "state",
    "kda_state": "state",
    "kv_cache": "state",
}
LAYER_ATTRS = frozenset({"attn_restart", "attn_rows", "commit_row", "ffn_restart", "ffn_rows"})
_TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
_EXPERT = re.compile(r"\.experts\.(w[123])\.")


def export_model(
    config: TextConfig,
    compute: Compute = "bf16",
    weight_dtype: WeightDType | None = None,
    page_tokens: int = PAGE_TOKENS,
) -> Module:
    """Export the text model.

    Args:
        config: The model.
        compute: Activation type.
        weight_dtype: Stored type of a linear or embedding weight by its checkpoint name, with `*`
            for the layer; None: all bf16.
        page_tokens: Positions of a page of the MLA cache.

    Returns:
        A module of level `model`: `prologue`, each block kind that occurs, `head`, `score_head`.

    Raises:
        ExportError: The model uses something that the IR cannot express.
    """
    layers = range(config.num_hidden_layers)
    types = input_types(config, compute, page_tokens)
    graphs: list[Graph] = []
    for name, (module, source) in _modules(config, compute).items():
        if weight_dtype is not None:
            retype_weights(module, lambda fqn, s=source: _TORCH[weight_dtype(s(fqn)).name])
        graphs.append(export_graph(module, name, types, source))
    schedule = (
        Call("prologue", -1),
        *(Call(config.kind(layer), layer, config.layer_attrs(layer)) for layer in layers),
        Call("head", -1, {"attn_restart": 0, "attn_rows": config.num_blocks}),
    )
    return Module("model", DIMS, tuple(graphs), schedule)


def _modules(
    config: TextConfig, compute: Compute
) -> dict[str, tuple[nn.Module, Callable[[str], str]]]:
    """Return the module of each graph on the meta device, and the source of its parameters."""
    options = ModelOptions(act=_TORCH[compute])
    kinds = sorted({config.kind(layer) for layer in range(config.num_hidden_layers)})
    with torch.device("meta"):
        return {
            "prologue": (Prologue(config, options), _end_source),
            **{kind: (make_block(config, kind, options), _block_source) for kind in kinds},
            "head": (Head(config, options), _end_source),
            "score_head": (ScoreHead(config, options), _end_source),
        }


def _block_source(fqn: str) -> str:
    return f"{MODEL}layers.*." + _EXPERT.sub(r".experts.*.\1.", fqn)


def _end_source(fqn: str) -> str:
    return LM_HEAD if fqn == "lm_head.weight" else MODEL + fqn


def input_types(
    config: TextConfig, compute: Compute, page_tokens: int = PAGE_TOKENS
) -> dict[str, TensorType]:
    """Return the type of every tensor that a graph of this model may take, by name.

    Args:
        config: The model.
        compute: Activation type.
        page_tokens: Positions of a page of the MLA cache.
    """
    act = BF16 if compute == "bf16" else F32
    hidden, width, dim = config.hidden_size, config.kda_width, config.kda_head_dim
    taps = config.short_conv_kernel_size - 1
    shapes: dict[str, tuple[DType, tuple[int | SymDim, ...]]] = {
        "prefix": (act, (T, hidden)),
        "pending": (act, (T, hidden)),
        "bank": (act, (config.num_blocks, T, hidden)),
        "conv_state": (act, (S, taps, 3 * width)),
        "kda_state": (F32, (S, config.kda_num_heads, dim, dim)),
        "kv_cache": (act, (P, page_tokens, config.kv_row)),
        "ids": (I32, (T,)),
        "targets": (I32, (T,)),
        "page_table": (I32, (B, M)),
        "seed": (I64, (B,)),
        "position": (I32, (B,)),
    }
    for name in ("seg_start", "seg_tokens", "slots", "context", "sample_rows", "top_k"):
        shapes[name] = (I32, (B,))
    for name in ("temperature", "top_p", "min_p"):
        shapes[name] = (F32, (B,))
    return {name: TensorType(dtype, shape) for name, (dtype, shape) in shapes.items()}


def export_graph(
    module: nn.Module,
    name: str,
    types: Mapping[str, TensorType],
    source: Callable[[str], str],
) -> Graph:
    """Export one module whose parameters are on the meta device.

    Args:
        module: `forward` takes tensors by the names in `types` and layer attributes by theirs;
            `OUTPUTS` names its results.
        name: Name of the graph.
        types: Type of each input; symbolic dimensions stay symbolic.
        source: Checkpoint name of a parameter.

    Raises:
        ExportError: torch cannot trace the module, or the IR cannot express what it traced.
    """
    names = [n for n in inspect.signature(module.forward).parameters if n not in LAYER_ATTRS]
    attrs = [n for n in inspect.signature(module.forward).parameters if n in LAYER_ATTRS]
    unknown = [n for n in names if n not in types]
    if unknown:
        raise ExportError(
            f"input {unknown[0]} is none of {', '.join(types)}", name, "pass tensors by these names"
        )
    ports = tuple(Port(n, _ROLES.get(n, "io"), _symbolic(types[n])) for n in names)
    program = _trace(module, name, {n: types[n] for n in names}, attrs)
    outputs = tuple(module.OUTPUTS)  # pyright: ignore[reportArgumentType]
    return import_program(program, ImportSpec(name, ports, tuple(attrs), outputs, source))


def _symbolic(kind: TensorType) -> dict[int, SymDim]:
    return {axis: dim for axis, dim in enumerate(kind.shape) if isinstance(dim, SymDim)}


def _trace(
    module: nn.Module, name: str, types: Mapping[str, TensorType], attrs: list[str]
) -> torch.export.ExportedProgram:
    dims = {d.name: torch.export.Dim(d.name, min=d.lo, max=d.hi) for d in DIMS}
    examples: dict[str, torch.Tensor] = {}
    dynamic: dict[str, dict[int, object]] = {attr: {} for attr in attrs}
    for key, kind in types.items():
        shape = kind.bind(_EXAMPLE).sizes
        examples[key] = torch.empty(shape, dtype=_TORCH[kind.dtype.name], device="meta")
        dynamic[key] = {axis: dims[dim.name] for axis, dim in _symbolic(kind).items()}
    for attr in attrs:
        examples[attr] = torch.empty((), dtype=torch.int32, device="meta")
    order = list(inspect.signature(module.forward).parameters)
    # The importer names inputs by position: ports in their order, then the attributes.
    order.sort(key=lambda key: key in LAYER_ATTRS)
    try:
        with torch.no_grad():
            return torch.export.export(
                module,
                (),
                kwargs={key: examples[key] for key in order},
                dynamic_shapes={key: dynamic[key] for key in order},
                strict=False,
            )
    except K3CError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # torch lists violated conditions as bullets below a headline.
        reason = next((line[2:] for line in lines if line.startswith("- ")), lines[0])
        what = f"torch.export refuses the module: {type(error).__name__}: {reason}"
        raise ExportError(what, name, "see --debug for torch's whole message") from error
