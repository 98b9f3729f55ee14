"""The whole story on one page: checkpoint, IR, passes, plans, kernels, artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from k3c import __version__
from k3c.artifact import (
    FORMAT,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    SPACES,
    Bucket,
    CacheInfo,
    Kernel,
    Manifest,
    ModelInfo,
    Plan,
    TargetInfo,
    WeightEntry,
    to_json,
)
from k3c.artifact_dir import CANDIDATES_FILE, PASSES_FILE, PLACEMENT_FILE, TOKENIZER_FOLDER
from k3c.artifact_writer import ArtifactWriter
from k3c.buckets import bucket_sizes, make_buckets
from k3c.candidates import candidate_list, select_variants
from k3c.codegen.kernel_key import KernelRequest, kernel_symbol
from k3c.codegen.template import packed_nbytes
from k3c.console import Console
from k3c.deployment import chosen_placement, target_and_mesh
from k3c.errors import ConfigError, PlanError
from k3c.explain import explain_kernels
from k3c.export_cache import Compute, exported
from k3c.ir.graph import Module
from k3c.ir.text import show
from k3c.kernels import add_kernels, catalogue_of, tool_versions
from k3c.mesh_limits import smallest_mesh
from k3c.model.config import PAGE_TOKENS, TextConfig, config_digest, load_config, stop_token_ids
from k3c.passes.build_plan import run as build_plan
from k3c.passes.context import PassContext
from k3c.passes.pipeline import PipelineResult, run_pipeline
from k3c.passes.schedule import run as schedule
from k3c.passes.select_kernels import Selected
from k3c.passes.select_kernels import run as select_kernels
from k3c.passes.weight_table import weight_table
from k3c.placement.placement import Placement
from k3c.targets.catalogue import Stage, Template
from k3c.targets.mesh import Mesh
from k3c.targets.target import Target
from k3c.unchanged import INPUTS_FILE, existing, inputs_of, to_text

if TYPE_CHECKING:
    from k3c.model.checkpoint import Checkpoint

COMPUTE_TYPES: Mapping[str, Compute] = {"bfloat16": "bf16", "float32": "f32"}
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True)
class CompileOptions:
    """What the user chose.

    Attributes:
        target: Name of the device.
        compute: Activation type.
        max_num_seqs: Requests held at the same time.
        max_model_len: Tokens of one request, prompt included.
        max_num_batched_tokens: Rows of the largest prefill step at most.
        candidates: Make an artifact for `k3c tune` instead of one to serve.
        buckets: Names of the buckets to compile, sorted out of all; empty: all.
        mesh: The ranks that share the model, as `tp=16,ep=16`; empty: one.
        rank: Which of them to pack weights for at once, and to load where nothing else is said;
            None: the only one, or none of several.
        latent: `sharded` to share the latent projections of the experts too.
        shared: `replicated` to keep the shared experts whole on every rank.
        vocabulary: `replicated` to keep embedding and head whole on every rank.
        placement: File that says which experts every rank holds; None: by number.
        explain: Say which kernels are built again, and why.
    """

    target: str
    compute: str = "bfloat16"
    max_num_seqs: int = 8
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    candidates: bool = False
    buckets: tuple[str, ...] = ()
    mesh: str = ""
    rank: int | None = None
    latent: str = "replicated"
    shared: str = "sharded"
    vocabulary: str = "sharded"
    placement: Path | None = None
    explain: bool = False


def export_text(model: Path, compute: str) -> str:
    """Return the exported model as IR text; weights are optional.

    Raises:
        ConfigError: The configuration is missing or wrong.
        CheckpointError: There are weights and their headers are damaged.
    """
    config = load_config(model)
    has_weights = model.is_dir() and any(model.glob("*.safetensors*"))
    checkpoint = _open_checkpoint(model, config) if has_weights else None
    return show(_export(config, compute, checkpoint))


def compile_model(model: Path, output: Path, options: CompileOptions, console: Console) -> Manifest:
    """Compile a Hugging Face checkpoint into the artifact directory `output`.

    `model` is its folder, or a config.json alone: then there are no weights, only measurements.

    Returns:
        The artifact's manifest.

    Raises:
        ConfigError: The configuration, an option or the output path is wrong.
        CheckpointError: The weights are damaged or do not match the configuration.
        PlanError: The plan needs more memory than the target has; no weight has been read.
        CodegenError: No kernel implements a node.
        DeviceFault: A tool is missing or the disk is full.
    """
    config = load_config(model)
    target, mesh = target_and_mesh(model, config, options, console)
    cache = _cache_info(config, options, bucket_sizes(target).page_tokens)
    writer = ArtifactWriter(output)
    source = _Source(model, config, None if model.is_file() else _open_checkpoint(model, config))
    with console.phase("export"):
        module = _export(config, options.compute, source.checkpoint, cache.page_tokens)
    placed = chosen_placement(module, mesh, options.placement, console)
    ctx = PassContext(target, catalogue_of(target), mesh=mesh, placement=placed)
    with console.phase("passes"):
        result = run_pipeline(module, ctx)
    with console.phase("plan"):
        buckets = _chosen(make_buckets(cache, target, options.max_num_batched_tokens), options)
        select = select_variants if options.candidates else _select
        planned = _plan(select(result.module, buckets, target), cache, target, placed)
        dims = {"S": cache.slots, "P": cache.pages}
        _check_fits(planned.plans, target, partial(smallest_mesh, config, module, dims, ctx))
    with writer:
        kernels = _add_code(writer, planned, options, console)
        has_tokenizer = _add_texts(writer, model, options, (module, result))
        packed = source.checkpoint if mesh is None or options.rank is not None else None
        if packed is not None:
            _add_weights(writer, packed, planned, options.rank or 0, console)
        info = _model_info(source, options.compute, has_tokenizer, packed is not None)
        return writer.finish(_manifest(info, planned, options.rank or 0, kernels))


def compile_unless_made(
    model: Path, output: Path, options: CompileOptions, console: Console
) -> Manifest:
    """Compile, or leave an artifact alone that the same inputs have made.

    Raises:
        ConfigError: As for `compile_model`; or the output was made from other inputs.
        ArtifactError: The same inputs made the output, and it is damaged now.
    """
    kept = existing(output, inputs_of(model, asdict(options))) if model.is_file() else None
    if kept is None:
        return compile_model(model, output, options, console)
    console.line(f"unchanged: every input of {output} is the same, and every member is whole")
    return kept


@dataclass(frozen=True)
class _Source:
    """What is compiled: a folder with weights, or a config.json alone, which has none."""

    path: Path
    config: TextConfig
    checkpoint: Checkpoint | None


def _model_info(source: _Source, compute: str, has_tokenizer: bool, has_weights: bool) -> ModelInfo:
    folder = source.path.parent if source.checkpoint is None else source.path
    return ModelInfo(
        name=folder.resolve().name,
        vocab_size=source.config.vocab_size,
        num_layers=source.config.num_hidden_layers,
        stop_ids=stop_token_ids(source.path, source.config),
        has_tokenizer=has_tokenizer,
        compute=COMPUTE_TYPES[compute],
        has_weights=has_weights,
        config_sha256=config_digest(source.config),
    )


def _add_code(
    writer: ArtifactWriter, planned: _Planned, options: CompileOptions, console: Console
) -> tuple[Kernel, ...]:
    """Build and add the kernels, the plans that launch them, and what a tuner must know."""
    for line in explain_kernels(planned.requests, planned.target) if options.explain else ():
        console.line(line)
    with console.phase(f"kernels ({len(planned.requests)})"):
        kernels = add_kernels(writer, planned.requests, planned.plans, planned.target)
    for plan in planned.plans:
        writer.add_plan(plan)
    if planned.placement is not None:
        writer.add_text(PLACEMENT_FILE, planned.placement.to_json())
    if options.candidates:
        writer.add_text(CANDIDATES_FILE, to_json(candidate_list(planned.selections)))
    return kernels


def _export(
    config: TextConfig, compute: str, checkpoint: Checkpoint | None, page_tokens: int = PAGE_TOKENS
) -> Module:
    return exported(config, COMPUTE_TYPES[compute], page_tokens, checkpoint)


def _open_checkpoint(model: Path, config: TextConfig) -> Checkpoint:
    # Reading weights needs torch, which takes seconds to import; a bare config.json does without.
    from k3c.model.checkpoint import Checkpoint

    return Checkpoint(model, config)


def _cache_info(config: TextConfig, options: CompileOptions, page_tokens: int) -> CacheInfo:
    """Size the hybrid state; page 0 and slot 0 are scratch.

    Raises:
        ConfigError: An option is out of range.
    """
    requests = _in_range("--max-num-seqs", options.max_num_seqs, 1, 4095)
    tokens = _in_range("--max-model-len", options.max_model_len, 2, config.max_position_embeddings)
    _in_range("--max-num-batched-tokens", options.max_num_batched_tokens, 1, 2**31 - 1)
    pages = -(-tokens // page_tokens)
    return CacheInfo(requests, tokens, page_tokens, requests * pages + 1, requests + 1)


def _in_range(option: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ConfigError(f"{value} is out of range, expected {low}..{high}", option)
    return value


@dataclass(frozen=True)
class _Planned:
    """What planning decided, for all buckets."""

    target: Target
    cache: CacheInfo
    selections: tuple[Selected, ...]
    plans: tuple[Plan, ...]
    weights: tuple[WeightEntry, ...]
    requests: tuple[KernelRequest, ...]
    placement: Placement | None = None

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the ranks that share the model, and their sizes."""
        return dict(self.selections[0].module.mesh)


def _chosen(buckets: tuple[Bucket, ...], options: CompileOptions) -> tuple[Bucket, ...]:
    """Return the buckets that the user wants.

    Raises:
        ConfigError: There is none of a name.
    """
    names = [bucket.name for bucket in buckets]
    unknown = [name for name in options.buckets if name not in names]
    if unknown:
        raise ConfigError(f"no bucket {unknown[0]!r}", "--buckets", f"there are {', '.join(names)}")
    return tuple(b for b in buckets if not options.buckets or b.name in options.buckets)


def _select(module: Module, buckets: Sequence[Bucket], target: Target) -> list[Selected]:
    """Select the kernels of every bucket."""
    catalogue = catalogue_of(target)
    return [select_kernels(module, bucket, catalogue, target) for bucket in buckets]


def _plan(
    selections: Sequence[Selected], cache: CacheInfo, target: Target, placement: Placement | None
) -> _Planned:
    """Plan every bucket."""
    table = weight_table(selections, packed_nbytes)
    requests: dict[str, KernelRequest] = {}
    symbol_of = partial(_symbol, requests)
    plans = tuple(build_plan(schedule(s), table, symbol_of) for s in selections)
    ordered = tuple(requests[symbol] for symbol in sorted(requests))
    return _Planned(target, cache, tuple(selections), plans, table.entries, ordered, placement)


def _largest(plans: Sequence[Plan]) -> dict[str, int]:
    """Return the bytes of each space that serve every bucket."""
    return {s: max(plan.space_bytes[s] for plan in plans) for s in SPACES}


def _check_fits(
    plans: Sequence[Plan], target: Target, smallest: Callable[[int], Mesh | None]
) -> None:
    """Compare what the runtime will allocate with the target's memory.

    Args:
        plans: Of all buckets.
        target: The device.
        smallest: Gives the smallest mesh that fits, for the bytes of scratch and io.

    Raises:
        PlanError: It is more.
    """
    sizes = _largest(plans)
    total_bytes = sum(sizes.values())
    if total_bytes <= target.memory_bytes:
        return
    what = f"{total_bytes / 2**30:.1f} GiB planned, {target.memory_bytes / 2**30:.1f} GiB there"
    where = ", ".join(f"{s} {n / 2**30:.1f}" for s, n in sizes.items())
    mesh = smallest(sizes["arena"] + sizes["io"]) if target.kind != "cpu" else None
    fits = f"--mesh {mesh} fits; or " if mesh else ""
    hint = f"{fits}lower --max-num-seqs or --max-model-len, or take a target with more memory"
    raise PlanError(what, f"{target.name}: {where} GiB", hint)


def _symbol(
    requests: dict[str, KernelRequest], template: Template, stage: Stage, target: Target
) -> str:
    """Return the symbol of a stage's kernel, and note that it is needed."""
    request = KernelRequest(template, stage.constants, stage.name)
    symbol = kernel_symbol(request, target)
    requests.setdefault(symbol, request)
    return symbol


def _add_weights(
    writer: ArtifactWriter, checkpoint: Checkpoint, planned: _Planned, rank: int, console: Console
) -> None:
    """Pack every weight of a rank once into the layout that its kernels read."""
    from k3c.weights import WeightPacker

    total_bytes = planned.plans[0].space_bytes["weights"]
    with console.phase("weights"):
        counter = console.count("weights", total_bytes)
        out = writer.start_weights(total_bytes)
        packer = WeightPacker(checkpoint, planned.mesh, rank, counter.add, planned.placement)
        packer.write(planned.weights, out)
        writer.end_weights(out)


def _add_texts(
    writer: ArtifactWriter,
    model: Path,
    options: CompileOptions,
    made: tuple[Module, PipelineResult],
) -> bool:
    """Add the IR, the pass report, the tokenizer and the inputs; return if there is a tokenizer."""
    module, result = made
    if model.is_file():
        writer.add_text(INPUTS_FILE, to_text(inputs_of(model, asdict(options))))
    writer.add_text("ir/00-export.k3", show(module))
    for name, text in sorted(result.texts.items()):
        writer.add_text(name, text)
    writer.add_text(PASSES_FILE, pass_report(result))
    has_tokenizer = all((model / name).is_file() for name in TOKENIZER_FILES)
    for name in TOKENIZER_FILES if has_tokenizer else ():
        writer.add_file(f"{TOKENIZER_FOLDER}/{name}", model / name)
    return has_tokenizer


def pass_report(result: PipelineResult) -> str:
    """Return the passes' records as JSON; times are left out, two builds are byte-identical."""
    rows = [record.facts() for record in result.records]
    return json.dumps(rows, sort_keys=True, indent=1) + "\n"


def _manifest(
    model: ModelInfo, planned: _Planned, rank: int, kernels: tuple[Kernel, ...]
) -> Manifest:
    """Return the manifest without its members, which the writer knows."""
    target, plans = planned.target, planned.plans
    return Manifest(
        format=FORMAT,
        major=FORMAT_MAJOR,
        minor=FORMAT_MINOR,
        k3c_version=__version__,
        toolchain=tool_versions(target),
        model=model,
        target=TargetInfo(
            target.name, target.kind, target.arch, target.features, target.min_driver
        ),
        cache=planned.cache,
        mesh=planned.mesh,
        rank=rank,
        buckets=tuple(plan.bucket for plan in plans),
        kernels=kernels,
        weights=planned.weights,
        space_bytes=_largest(plans),
        members={},
    )
