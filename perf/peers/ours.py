"""k3c's own kernels in the same form: the launches of some nodes of all layers, as one graph.

Each layer has its own weights and state, so that every launch reads cold memory; what a launch
computes from means nothing, and takes as long as if it did. Where k3c fuses what a peer does in
several calls, the row names all of them, and their sum is what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from k3c.runtime.binding import Bound
from k3c.runtime.measuring.standalone import Standalone
from k3c.runtime.measuring.timing import time_graph
from k3c.runtime.measuring.workload import Workload, fill_inputs

ROUNDS = 7
Shape = tuple[str, str]  # a peers' row: section and shape


@dataclass(frozen=True)
class Nodes:
    """Some nodes of a layer that make one row.

    Attributes:
        bucket: The step that they are taken from.
        labels: The labels of their commands.
        peers: The peers' rows that do the same together.
        graph: The kind of layer.
        context_tokens: Of each request before the step.
    """

    bucket: str
    labels: tuple[str, ...]
    peers: tuple[Shape, ...]
    graph: str = "kda_moe"
    context_tokens: int = 8192


def decode_rows(requests: int) -> Iterator[Nodes]:
    """Yield the rows of a decode step of a TP16 and EP16 rank with 8k tokens of context."""
    bucket = f"decode.b{requests}"

    def gemms(*shapes: str) -> tuple[Shape, ...]:
        return tuple(("gemm", shape.replace(" ", f" m{requests} ")) for shape in shapes)

    experts = ("route_dispatch -> %route_topk_0", "grouped_gemm -> %situ")
    experts += ("grouped_gemm -> %grouped_linear_2", "combine -> %combine_part")
    yield Nodes(bucket, experts, (("moe", f"EP16 T{requests}"),))
    forget, state = gemms("kda_f_b 768x128"), (("kda_decode", f"H6 b{requests}"),)
    yield Nodes(bucket, ("kda_fb -> %gated_rms_norm",), (*forget, *state))
    yield Nodes(bucket, ("linear -> %q",), gemms("kda_qkvg 3072x7168", "kda_f_a_beta 224x7168"))
    yield Nodes(bucket, ("linear -> %o_part",), gemms("kda_o 7168x768"))
    wide = gemms("router 896x7168", "latent_down 3584x7168", "shared_gate_up 768x7168")
    yield Nodes(bucket, ("linear -> %gate",), wide)
    yield Nodes(bucket, ("linear -> %down_part",), gemms("shared_down 7168x384"))
    yield Nodes(bucket, ("norm_linear -> %add",), gemms("latent_up 7168x3584"))
    attend = (("mla_decode", f"H6 ctx8192 b{requests}"),)
    yield Nodes(bucket, ("mla_attend -> %o_lat",), attend, "mla_moe")


def prefill_rows(tokens: int) -> Iterator[Nodes]:
    """Yield the rows of a prefill step of one request."""
    bucket, kda = f"prefill.t{tokens}", f"H6 T{tokens}"
    experts = ("route_dispatch -> %route_topk_0", "grouped_gemm -> %situ")
    experts += ("grouped_gemm -> %grouped_linear_2", "combine -> %combine_part")
    yield Nodes(bucket, experts, (("moe", f"EP16 T{tokens}"),), context_tokens=0)
    state = (("kda_prefill", kda), ("kda_conv", kda))
    yield Nodes(bucket, ("kda_fb -> %gated_rms_norm",), state, context_tokens=0)
    mix = (("attn_res", f"5 sources T{tokens}"),)
    yield Nodes(bucket, ("attn_res_norm -> %residual_join_1",), mix, context_tokens=0)


TABLE: Mapping[str, tuple[Nodes, ...]] = {
    "W1": tuple(row for requests in (1, 8, 64) for row in decode_rows(requests)),
    "W2": tuple(row for tokens in (2048, 8192) for row in prefill_rows(tokens)),
    "W1L": tuple(
        Nodes(
            f"decode.b{n}", ("mla_attend -> %o_lat",), (("mla_decode", f"H6 ctx131072 b{n}"),),
            "mla_moe", 131072,
        )
        for n in (1, 8)
    ),
}  # fmt: skip


def chosen(commands: Sequence[Bound], nodes: Nodes) -> list[Bound]:
    """Return the launches of a row, in the order of the step."""
    return [
        bound
        for bound in commands
        if bound.command.label in nodes.labels and f", {nodes.graph} layer " in bound.label
    ]


def layers_of(launches: Sequence[Bound]) -> int:
    """Return of how many layers launches are: their labels start with bucket, graph and layer."""
    return len({",".join(bound.label.split(",")[:2]) for bound in launches})


def measure(artifact: Path, workload: str) -> Iterator[dict[str, object]]:
    """Yield a row for each line of a workload's table: microseconds of one layer's nodes.

    Raises:
        ConfigError: The artifact has no such bucket.
        DeviceFault: The device is missing or fails.
    """
    with Standalone.open(artifact, lambda line: print(line, file=sys.stderr)) as rank:
        for nodes in TABLE[workload]:
            yield _row(rank, nodes)


def _row(rank: Standalone, nodes: Nodes) -> dict[str, object]:
    width = int(nodes.bucket.rpartition(".")[2][1:])
    decode = nodes.bucket.startswith("decode")
    sizes = ((width,), ()) if decode else ((), (width,))
    bucket = Workload("peers", nodes.context_tokens, *sizes).buckets(rank.manifest)[0]
    commands = rank.prepare(
        rank.plan(bucket.name),
        lambda io: fill_inputs(io, bucket, nodes.context_tokens, rank.manifest),
    )
    launches = chosen(commands, nodes)
    layers = layers_of(launches)
    assert layers, f"no node of {nodes.graph} in {nodes.bucket} is one of {nodes.labels}"
    taken = asdict(time_graph(rank.driver, launches, ROUNDS))
    floor_us = sum(bound.command.floor_ns for bound in launches) / 1e3
    each = {key: us / layers for key, us in {"floor_us": floor_us, **taken}.items()}
    shape = f"{nodes.bucket} {', '.join(nodes.labels)}"
    return {"op": nodes.peers[0][0], "shape": shape, "peer": "k3c", "sum_of": nodes.peers, **each}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("workload", choices=sorted(TABLE))
    arguments = parser.parse_args()
    for line in measure(arguments.artifact, arguments.workload):
        print(json.dumps(line), flush=True)
