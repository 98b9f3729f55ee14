"""The answer of `k3c plan` as data: integers, strings and tuples, JSON both ways.

`k3c/planner/screen.py` renders it for a terminal, the report for a browser. Standard library only.
Times are integers of microseconds, rates integers of thousandths (`_milli`), shares integers of
thousandths: the same request gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3c.artifact_json import from_json, to_json

FORMAT = "k3c-plan 1"
Goal = Literal["latency", "throughput", "fit"]
Source = Literal["quick", "exact"]
Seen = Literal["quick", "timed", "exact"]


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        model: Name of the model: its folder, or the folder of its config.json.
        target: Name of the topology or device.
        mesh: The mesh that the user named; empty: search.
        goal: What the search looks for.
        compute: Activation type.
        max_num_seqs: Requests that a data-parallel rank holds at the same time.
        max_model_len: Tokens of one request, prompt included.
        max_num_batched_tokens: Rows of the largest prefill step of a data-parallel rank at most.
        input_len: Tokens of a prompt that times are given for.
        output_len: Tokens generated for each prompt.
        snapshots: Kept states, of a data-parallel rank, beside those of running requests.
        draft: Name of the draft model; empty: none.
        graph_budget_bytes: Bytes that graphs of a rank may take; -1: what is free.
        latent, shared, vocabulary: Of latent projections, shared experts, embedding and head:
            `replicated`, `sharded`, or `auto`: by cost.
    """

    model: str
    target: str
    mesh: str
    goal: Goal
    compute: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    input_len: int
    output_len: int
    snapshots: int
    draft: str
    graph_budget_bytes: int
    latent: str
    shared: str
    vocabulary: str


@dataclass(frozen=True)
class Deployment:
    """How the machine is used.

    Attributes:
        mesh: The mesh of one replica of the deployment, as the command line takes it.
        name: Its short name, e.g. TEP16.
        tp: Ranks that share heads.
        ep: Ranks that share the routed experts.
        dp: Groups of ranks that hold requests of their own.
        pp: Pipeline stages.
        latent, shared, vocabulary: `replicated` or `sharded`.
        ranks: Ranks of one replica of the deployment.
        replicas: Independent replicas of the deployment in the machine.
        spare_ranks: Ranks of the machine that no replica uses.
        physical_experts: Physical experts of a rank.
        expert_replicas: Physical experts of all ranks beyond the logical ones.
    """

    mesh: str
    name: str
    tp: int
    ep: int
    dp: int
    pp: int
    latent: str
    shared: str
    vocabulary: str
    ranks: int
    replicas: int
    spare_ranks: int
    physical_experts: int
    expert_replicas: int


@dataclass(frozen=True)
class Choice:
    """One decision that the planner took, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of one use of a rank's memory; the lines of a rank and its free bytes sum to it.

    Attributes:
        name: weights, spare_experts, activations, io, communication, mla_pages, kda_slots,
            snapshots, draft_weights, draft_kv, draft_records, graphs, driver.
        nbytes: Bytes.
        exact: They are what the runtime allocates; else an estimate, whose source `note` names.
        note: What they are made of, or where the figure is from.
    """

    name: str
    nbytes: int
    exact: bool
    note: str


@dataclass(frozen=True)
class StageMemory:
    """The memory of every rank of one pipeline stage: they need the same.

    Attributes:
        stage: The stage, from 0.
        first_layer: Its first layer.
        last_layer: One past its last layer.
        ranks: Ranks of the stage.
        lines: Where the bytes go, in the order of `MemoryLine.name`.
        total_bytes: Their sum.
        device_bytes: Memory of the device.
        free_bytes: What is left; negative: what is missing.
    """

    stage: int
    first_layer: int
    last_layer: int
    ranks: int
    lines: tuple[MemoryLine, ...]
    total_bytes: int
    device_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class KindLine:
    """What one kind of a model's parts needs on one rank of the busiest stage.

    Attributes:
        kind: kda, mla, router, latent, shared, experts, dense, embed, head, norms, padding, or
            draft.
        layers: Layers of the stage that have it; 0 where it is not of a layer.
        weight_bytes: Weights of all of them; `padding` has what layouts and alignment add.
        state_bytes: State that a request keeps whatever its length.
        token_bytes: State that a token of context adds.
    """

    kind: str
    layers: int
    weight_bytes: int
    state_bytes: int
    token_bytes: int


@dataclass(frozen=True)
class BucketLine:
    """One bucket on one rank of the busiest stage.

    Attributes:
        name: The bucket.
        tokens: Rows of a step.
        requests: Requests of a step.
        arena_bytes: Scratch.
        arena_lower_bound_bytes: The largest set of scratch bytes live at one time.
        launches: Launches of a step.
        graph_bytes: Estimated memory of its graph.
        kept: It is part of the plan.
        why: Why it is not; empty where it is.
    """

    name: str
    tokens: int
    requests: int
    arena_bytes: int
    arena_lower_bound_bytes: int
    launches: int
    graph_bytes: int
    kept: bool
    why: str


@dataclass(frozen=True)
class ContextLine:
    """How many requests of one length a deployment holds at the same time.

    Attributes:
        context_tokens: Tokens of each request.
        per_data_rank: Requests of a data-parallel rank.
        total: Requests of all data-parallel ranks of all replicas.
        limit: What runs out first: `mla_pages`, `kda_slots`, or `model`: too long for it.
    """

    context_tokens: int
    per_data_rank: int
    total: int
    limit: str


@dataclass(frozen=True)
class Capacity:
    """How much state fits, and what one more of each thing costs a rank.

    Attributes:
        max_num_seqs: Largest legal --max-num-seqs at the --max-model-len asked for, per
            data-parallel rank.
        max_model_len: Largest legal --max-model-len at the --max-num-seqs asked for.
        contexts: Requests by context.
        million_tokens_bytes: What 1,048,576 tokens of context cost a rank.
        token_bytes: What one token of context costs a rank, draft included.
        request_bytes: What a request costs a rank whatever its length: its state slots.
        slots_per_request: State slots of a request: more than one with a draft.
        snapshot_bytes: What one more kept snapshot costs a rank.
        replica_slot_bytes: What one more physical expert per layer costs a rank.
        page_tokens: Tokens of a page.
    """

    max_num_seqs: int
    max_model_len: int
    contexts: tuple[ContextLine, ...]
    million_tokens_bytes: int
    token_bytes: int
    request_bytes: int
    slots_per_request: int
    snapshot_bytes: int
    replica_slot_bytes: int
    page_tokens: int


@dataclass(frozen=True)
class Interval:
    """A predicted number with its error bar: low <= value <= high."""

    value: int
    low: int
    high: int


@dataclass(frozen=True)
class KindTime:
    """Time of one kind of node in a step, and what it could not be faster than."""

    kind: str
    us: int
    floor_us: int


@dataclass(frozen=True)
class Speed:
    """Predicted times and rates.

    Attributes:
        concurrency: Requests of a data-parallel rank that decode together.
        context_tokens: Tokens of context of each.
        ttft_us: Time to the first token of one prompt on an idle deployment.
        tpot_us: Time per output token with `concurrency` requests.
        user_milli: Thousandths of tokens per second and user.
        gpu_milli: Thousandths of output tokens per second and GPU of the machine.
        single_tpot_us: Time per output token of one request alone.
        decode_kinds: Where the time of a decode step goes, longest first.
        prefill_kinds: Where the time of a prompt goes, longest first.
        source: What the estimate is made from.
    """

    concurrency: int
    context_tokens: int
    ttft_us: Interval
    tpot_us: Interval
    user_milli: Interval
    gpu_milli: Interval
    single_tpot_us: Interval
    decode_kinds: tuple[KindTime, ...]
    prefill_kinds: tuple[KindTime, ...]
    source: str


@dataclass(frozen=True)
class Change:
    """One thing to change, found by planning again with it.

    Attributes:
        option: What to type.
        effect: What it gains and costs, in numbers.
        fits: The plan fits with it.
        free_bytes: Bytes free on the fullest rank with it.
        max_num_seqs: Requests that a machine holds with it at the length asked for.
        tpot_us: Time per output token with it.
        ttft_us: Time to the first token with it.
    """

    option: str
    effect: str
    fits: bool
    free_bytes: int
    max_num_seqs: int
    tpot_us: int
    ttft_us: int


@dataclass(frozen=True)
class Candidate:
    """A mesh that was considered.

    Attributes:
        name: Its short name.
        mesh: As the command line takes it.
        ranks: Ranks of one replica.
        replicas: Replicas in the machine.
        fits: It holds what was asked for.
        free_bytes: Bytes free on the fullest rank; negative: missing.
        tpot_us: Time per output token; 0: not estimated.
        gpu_milli: Thousandths of tokens per second and GPU; 0: not estimated.
        why: Why it was taken or not, in a line.
        source: `quick`: closed forms, the time a floor; `timed`: its time is an estimate node by
            node; `exact`: planned as well.
    """

    name: str
    mesh: str
    ranks: int
    replicas: int
    fits: bool
    free_bytes: int
    tpot_us: int
    gpu_milli: int
    why: str
    source: Seen


@dataclass(frozen=True)
class Answer:
    """The whole answer.

    Attributes:
        format: `k3c-plan 1`.
        k3c_version: What made it.
        request: What was asked for.
        fits: It fits.
        verdict: The first line: fits or not, by how much.
        source: `quick`: from closed forms alone; `exact`: from the plans that the runtime runs.
        deployment: How the machine is used.
        choices: Decisions of the planner with reasons.
        stages: Memory of a rank of each pipeline stage; the fullest is the one that decides.
        kinds: Bytes by kind of part, on the fullest stage.
        buckets: All buckets.
        capacity: How much state fits.
        speed: Times and rates; none where nothing was estimated.
        changes: The three largest things to change.
        candidates: Meshes that were considered, best first.
        warnings: What to look at.
    """

    format: str
    k3c_version: str
    request: Request
    fits: bool
    verdict: str
    source: Source
    deployment: Deployment
    choices: tuple[Choice, ...]
    stages: tuple[StageMemory, ...]
    kinds: tuple[KindLine, ...]
    buckets: tuple[BucketLine, ...]
    capacity: Capacity
    speed: tuple[Speed, ...]
    changes: tuple[Change, ...]
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage with the fewest free bytes."""
        return min(self.stages, key=lambda stage: (stage.free_bytes, stage.stage))


def answer_json(answer: Answer) -> str:
    """Return an answer as JSON text in one deterministic form."""
    return to_json(answer)


def answer_from_json(text: str, where: str) -> Answer:
    """Parse what `answer_json` wrote; `where` names its file for messages.

    Raises:
        ArtifactError: The text is not JSON or not an answer of this version.
    """
    return from_json(Answer, text, where)
