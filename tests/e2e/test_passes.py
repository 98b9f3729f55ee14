"""What the passes do to the demo, as `k3c inspect --passes` tells it: golden counts.

A rule that stops matching turns this red (FU03, FU05): a drop is never silent. The demo has three
block kinds (kda_dense, kda_moe, mla_moe), a head and a score head.
"""

import json

from tests.support.compiled import k3c

MATCHES = {
    "canonicalize": {},
    "shard": {},
    # Two sites in each block kind, one readout in each head; the first of a block commits.
    "fuse_attn_res": {"attention_site": 3, "site": 5},
    # Per kind: the projections of attention and of the feed-forward; gate and up of the experts.
    "fuse_projections": {"same_experts": 2, "same_input": 6},
    "fuse_kda": {"kda": 2},
    # Fusions that no CPU template implements.
    "fuse_forget_gate": {},
    "fuse_route": {},
    "fuse_norm_linear": {},
    "add_advance": {},
    "lower_mla": {"absorbed": 1},
    "lower_moe": {"grouped_gemm": 4},
    # SiTU: dense, and shared and routed experts of two kinds; one gate; sums and norms of MoE.
    "fuse_epilogue": {"add": 2, "combine_norm": 2, "output_gate": 1, "situ": 5},
    "layout_mxfp4": {"mxfp4": 4, "panel": 27},
}
NODES = (104, 48)


def test_every_pass_matches_as_often_as_it_should(demo_bf16):
    rows = json.loads(k3c("inspect", demo_bf16, "--passes", "--json").stdout)["passes"]
    assert {row["name"]: row["matches"] for row in rows} == MATCHES
    for row in rows:
        total = sum(row["matches"].values())
        assert row["expected"] is None or total >= row["expected"], row["name"]
        assert row["refusals"] == []
    assert (rows[0]["nodes_before"], rows[-1]["nodes_after"]) == NODES


def test_passes_are_printed_with_counts_and_nodes(demo_bf16):
    text = k3c("inspect", demo_bf16, "--passes").stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()[:1]}
    for name, matches in MATCHES.items():
        assert str(sum(matches.values())) in lines[name].split()
    assert "85 -> 64" in lines["fuse_projections"]
