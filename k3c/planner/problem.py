"""What is asked: the options of `k3c plan`, read and checked before anything is planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3c.buckets import bucket_sizes
from k3c.errors import ConfigError
from k3c.model.config import TextConfig, load_config
from k3c.planner.answer import Goal, Request
from k3c.planner.draft import DraftConfig, load_draft
from k3c.planner.quick import ACT_BYTES, Load
from k3c.targets.mesh import Mesh, parse_mesh
from k3c.targets.target import Target
from k3c.targets.topology import Topology, load_topology

GOALS: tuple[Goal, ...] = ("latency", "throughput", "fit")
MAX_REQUESTS = 4095  # what a compiled artifact takes
INPUT_TOKENS, OUTPUT_TOKENS = 4096, 1024  # a prompt and an answer, where nothing is said


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose; see `Request` for the meaning of each. -1: not said."""

    target: str
    mesh: str = ""
    goal: str = "latency"
    compute: str = "bfloat16"
    max_num_seqs: int = 8
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    input_len: int = -1
    output_len: int = -1
    snapshots: int = 0
    snapshot_every: int = 0
    draft: Path | None = None
    graph_budget_bytes: int = -1
    spare_slots: int = 0
    latent: str = "auto"
    shared: str = "auto"
    vocabulary: str = "auto"


@dataclass(frozen=True)
class Asked:
    """What a data-parallel rank is asked to hold; the same for every stage.

    Attributes:
        requests: Requests at the same time.
        context_tokens: Tokens of each.
        chunk_tokens: Rows of the largest prefill bucket at most.
        page_tokens: Tokens of a page.
        act_bytes: Bytes of an activation.
        snapshots: Kept states, whatever the number of requests.
        snapshot_every: Tokens between the states that a running request keeps; 0: none.
        draft: The draft; None: no speculation.
        graph_budget_bytes: Bytes that graphs may take; -1: half of the reserve.
    """

    requests: int
    context_tokens: int
    chunk_tokens: int
    page_tokens: int
    act_bytes: int
    snapshots: int = 0
    snapshot_every: int = 0
    draft: DraftConfig | None = None
    graph_budget_bytes: int = -1

    def kept_states(self, requests: int, context_tokens: int) -> int:
        """Return the snapshots kept beside the states of `requests` requests."""
        every = context_tokens // self.snapshot_every if self.snapshot_every else 0
        return self.snapshots + requests * every

    def load(self, requests: int, context_tokens: int, decode_requests: int) -> Load:
        """Return what closed forms need for other numbers of requests and tokens."""
        return Load(
            requests,
            context_tokens,
            self.chunk_tokens,
            decode_requests,
            self.page_tokens,
            self.kept_states(requests, context_tokens),
            self.act_bytes,
        )


@dataclass(frozen=True)
class Problem:
    """A checked request.

    Attributes:
        request: What was asked for, as the answer repeats it.
        options: The same as options.
        config: The model.
        machine: The machine.
        asked: What a data-parallel rank must hold.
        mesh: The mesh that the user named; None: search.
    """

    request: Request
    options: PlanOptions
    config: TextConfig
    machine: Topology
    asked: Asked
    mesh: Mesh | None


def read_problem(model: Path, options: PlanOptions) -> Problem:
    """Read the configuration, the machine and the draft, and check every option.

    Raises:
        ConfigError: Something is missing, unknown or out of range; both numbers are in the message.
    """
    config = load_config(model)
    machine = load_topology(options.target)
    draft = load_draft(options.draft, config) if options.draft is not None else None
    _check_numbers(options, config)
    lengths = _lengths(options)
    asked = _asked(options, config, machine, draft)
    named = (parse_mesh(options.mesh) or Mesh()) if options.mesh else None
    request = Request(
        model=(model if model.is_dir() else model.parent).resolve().name,
        target=machine.name,
        mesh=options.mesh,
        goal=next(goal for goal in GOALS if goal == options.goal),
        compute=options.compute,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        input_len=lengths[0],
        output_len=lengths[1],
        snapshots=asked.kept_states(asked.requests, asked.context_tokens),
        draft=draft.name if draft is not None else "",
        graph_budget_bytes=options.graph_budget_bytes,
        latent=options.latent,
        shared=options.shared,
        vocabulary=options.vocabulary,
    )
    return Problem(request, options, config, machine, asked, named)


def _asked(
    options: PlanOptions, config: TextConfig, machine: Topology, draft: DraftConfig | None
) -> Asked:
    if draft is not None:
        rows = options.max_num_seqs * draft.width
        if rows > options.max_num_batched_tokens:
            what = f"{options.max_num_seqs:,} requests of {draft.width} verified rows are {rows:,}"
            limit = options.max_num_batched_tokens
            hint = f"--max-num-seqs {limit // draft.width} or --max-num-batched-tokens {rows}"
            where = f"--max-num-batched-tokens {limit}"
            raise ConfigError(f"{what} rows a step, at most {limit:,} allowed", where, hint)
    return Asked(
        options.max_num_seqs,
        options.max_model_len,
        options.max_num_batched_tokens,
        bucket_sizes(machine.target).page_tokens,
        ACT_BYTES[options.compute],
        options.snapshots,
        options.snapshot_every,
        draft,
        options.graph_budget_bytes,
    )


def _check_numbers(options: PlanOptions, config: TextConfig) -> None:
    if options.goal not in GOALS:
        raise ConfigError(f"unknown goal {options.goal!r}", "--goal", f"one of {', '.join(GOALS)}")
    for name in ("latent", "shared", "vocabulary"):
        value = getattr(options, name)
        if value not in ("auto", "replicated", "sharded"):
            raise ConfigError(f"found {value!r}", f"--{name}", "auto, replicated or sharded")
    most = config.max_position_embeddings
    if options.max_model_len > most:
        what = f"{options.max_model_len:,} tokens asked for, the model has {most:,} positions"
        raise ConfigError(what, "--max-model-len", f"--max-model-len {most} is the longest")
    _in_range("--max-model-len", options.max_model_len, 2, most)
    _in_range("--max-num-seqs", options.max_num_seqs, 1, MAX_REQUESTS)
    _in_range("--max-num-batched-tokens", options.max_num_batched_tokens, 1, 2**31 - 1)
    _in_range("--snapshots", options.snapshots, 0, 2**31 - 1)
    _in_range("--snapshot-every", options.snapshot_every, 0, most)
    _in_range("--spare-slots", options.spare_slots, 0, config.num_experts)


def _lengths(options: PlanOptions) -> tuple[int, int]:
    """Return the tokens of a prompt and of an answer; together they must fit a request."""
    longest = options.max_model_len
    given = [options.input_len, options.output_len]
    if given[0] == 0 or given[1] == 0 or min(given) < -1:
        what = f"found {given[0]} and {given[1]} tokens"
        raise ConfigError(what, "--input-len, --output-len", "at least 1 each")
    prompt = given[0] if given[0] > 0 else min(INPUT_TOKENS, max(1, longest // 2))
    answer = given[1] if given[1] > 0 else min(OUTPUT_TOKENS, longest - prompt)
    if prompt + answer > longest or answer < 1:
        what = f"{prompt:,} tokens in and {max(answer, 1):,} out are more than {longest:,}"
        hint = f"--max-model-len {prompt + max(answer, 1)}, or fewer tokens"
        raise ConfigError(what, f"--max-model-len {longest}", hint)
    return prompt, answer


def _in_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        what = f"{value:,} is out of range, expected {low:,}..{high:,}"
        raise ConfigError(what, option, f"{option} {min(max(value, low), high)} is the nearest")


def decode_size(target: Target, requests: int) -> int:
    """Return the requests of the largest decode bucket that `requests` requests need."""
    sizes = bucket_sizes(target).decode_requests
    return next((n for n in sizes if n >= requests), sizes[-1])
