"""What measures without serving: tables of tuning, inputs of workloads, drawn routing's pieces."""

import json

import numpy as np
import pytest

from k3c.artifact import Bucket, Candidate
from k3c.errors import ConfigError
from k3c.runtime.measuring import tuning
from k3c.runtime.measuring.workload import WORKLOADS, fill_inputs
from tests.support.fake_plan import Sizes, make_buckets, make_manifest


def measured(key, config, us):
    return tuning._Measured(Candidate("decode.b1.v0", "g", "op -> %y", "linear", key, config), us)


def test_the_fastest_configuration_of_each_node_is_kept_and_the_first_of_equal_ones(tmp_path):
    rows = [
        measured("a", {"n": 1}, 3.0),
        measured("b", {"n": 1}, 9.0),
        measured("a", {"n": 2}, 2.0),
        measured("a", {"n": 3}, 2.0),
    ]
    best = tuning._best(rows, "some GPU")
    assert [(e["key"], e["config"], e["us"], e["measured"]) for e in best] == [
        ("a", {"n": 2}, 2.0, 3),
        ("b", {"n": 1}, 9.0, 1),
    ]
    assert {e["device"] for e in best} == {"some GPU"}


def test_a_table_is_extended_and_its_measured_entries_are_replaced(tmp_path):
    table = tmp_path / "gpu.json"
    tuning._write(table, tuning._best([measured("a", {"n": 1}, 3.0)], "x"))
    tuning._write(table, tuning._best([measured("c", {"n": 5}, 1.0)], "x"))
    tuning._write(table, tuning._best([measured("a", {"n": 2}, 4.0)], "x"))
    entries = json.loads(table.read_text())["entries"]
    assert [(e["key"], e["config"]["n"]) for e in entries] == [("a", 2), ("c", 5)]
    assert list(tmp_path.iterdir()) == [table]


def fields(bucket):
    rows, segments, pages = bucket.dims["T"], bucket.dims["B"], bucket.dims["M"]
    shapes = dict.fromkeys(
        ("seg_start", "seg_tokens", "context", "slots", "sample_rows", "top_p"), (segments,)
    )
    shapes |= {"ids": (rows,), "page_table": (segments, pages)}
    return {name: np.full(shape, -7, np.int32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("phase", "rows", "segments"), [("decode", 3, 3), ("prefill", 63, 4), ("prefill", 1, 4)]
)
def test_every_row_of_a_workload_s_step_is_live_and_its_pages_are_not_scratch(
    phase, rows, segments
):
    sizes = Sizes()
    manifest = make_manifest(sizes, make_buckets(sizes))
    bucket = Bucket("x", phase, {"T": rows, "B": segments, "M": 2})
    io = fields(bucket)
    fill_inputs(io, bucket, 5, manifest)
    live = rows if phase == "decode" else 1
    assert io["seg_tokens"].sum() == rows
    assert (io["seg_tokens"][:live] == rows // live).all()
    assert (io["context"][:live] == 5).all()
    assert (io["slots"][:live] > 0).all()
    assert (io["page_table"][:live] > 0).all()
    assert (io["page_table"] < manifest.cache.pages).all()
    assert (np.diff(io["seg_start"]) >= 0).all()
    ends = io["seg_start"][:live] + io["seg_tokens"][:live] - 1
    assert (io["sample_rows"][:live] == ends).all()


def test_a_workload_names_the_buckets_that_an_artifact_lacks():
    sizes = Sizes()
    manifest = make_manifest(sizes, make_buckets(sizes))
    with pytest.raises(ConfigError, match=r"decode\.b64"):
        WORKLOADS["W1"].buckets(manifest)
