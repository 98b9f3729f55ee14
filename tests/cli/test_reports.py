"""`k3c eval`, `k3c inspect` and `k3c bench`: their JSON forms, their text, what eval refuses."""

import json

import pytest

from tests.support.compiled import demo_golden, k3c

BUCKETS = [
    *(f"decode.b{n}" for n in (1, 2, 4, 8)),
    *(f"prefill.t{n}" for n in (16, 64, 256)),
    "score.t64",
]


@pytest.fixture(scope="module")
def texts():
    return demo_golden()["nll"]


def test_eval_of_token_lists_gives_one_mean_over_all_predicted_tokens(demo_f32, texts, tmp_path):
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([texts[0]["ids"], texts[1]["ids"][:101], [5]]))
    report = json.loads(k3c("eval", demo_f32, "--tokens", file, "--json").stdout)
    assert report.keys() == {"tokens", "mean_nll"}
    assert report["tokens"] == 599 + 100
    file.write_text(json.dumps([texts[0]["ids"]]))
    report = json.loads(k3c("eval", demo_f32, "--tokens", file, "--json").stdout)
    assert abs(report["mean_nll"] - texts[0]["mean_nll"]) < 1e-4


def test_eval_of_a_text_in_the_default_mode_is_near_its_float32_value(
    demo_f32, demo_bf16, tmp_path
):
    file = tmp_path / "text.py"
    file.write_text("import os\n\n\ndef path_of(name):\n    return os.path.join('a', name)\n" * 6)
    exact, found = (
        json.loads(k3c("eval", artifact, "--text", file, "--json").stdout)
        for artifact in (demo_f32, demo_bf16)
    )
    assert exact["tokens"] == found["tokens"] > 50
    # Repeated text has a loss near 0, where half a percent is less than bf16 resolves.
    assert abs(found["mean_nll"] - exact["mean_nll"]) < 0.005 * exact["mean_nll"] + 0.005
    plain = k3c("eval", demo_f32, "--text", file).stdout
    assert plain == (
        f"{exact['tokens']} tokens, mean negative log likelihood {exact['mean_nll']:.6f} nats\n"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([[5], [6]], "every list has fewer than 2 tokens"),
        ([[1, 5000]], "token id 5000 at index 1 is outside the vocabulary of 4096 (list 0)"),
        ([[1] * 8193], "8193 tokens exceed the planned 8192"),
    ],
)
def test_eval_refuses_lists_that_it_cannot_score(demo_f32, tmp_path, content, words):
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(content))
    done = k3c("eval", demo_f32, "--tokens", file, "--json", check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_eval_needs_exactly_one_source(demo_f32, tmp_path, refuse):
    both = ("--text", tmp_path / "a", "--tokens", tmp_path / "b")
    for options in ((), both):
        line = refuse(2, "ConfigError", "eval", demo_f32, *options)
        assert "exactly one of --text and --tokens" in line


def test_eval_of_a_text_that_is_missing_is_refused(demo_f32, tmp_path):
    done = k3c("eval", demo_f32, "--text", tmp_path / "none.txt", check=False)
    assert done.returncode == 2
    assert str(tmp_path / "none.txt") in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_of_a_text_that_is_not_utf_8_is_refused(demo_f32, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    done = k3c("eval", demo_f32, "--text", tmp_path / "latin.txt", check=False)
    assert done.returncode == 2
    assert "latin.txt" in done.stderr


def test_inspect_prints_model_target_buckets_and_kernels(run, demo_bf16):
    code, out, _ = run("inspect", demo_bf16, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["model"]["name"] == "k3-demo"
    assert report["model"]["compute"] == "bf16"
    assert report["model"]["stop_ids"] == [3842, 3841]
    assert report["target"]["name"].startswith("cpu-avx")
    assert [b["name"] for b in report["buckets"]] == BUCKETS
    assert sum(report["kernels"].values()) > 20
    code, out, _ = run("inspect", demo_bf16)
    assert code == 0
    assert all(name in out for name in BUCKETS)


def test_inspect_memory_accounts_for_every_byte_of_every_space(run, demo_bf16):
    code, out, _ = run("inspect", demo_bf16, "--json", "--memory")
    report = json.loads(out)
    assert code == 0
    assert list(report["memory"]) == sorted(BUCKETS)
    for name, memory in report["memory"].items():
        ends = dict.fromkeys(report["space_bytes"], 0)
        for segment in memory["segments"]:
            assert segment["offset"] == ends[segment["space"]], name
            ends[segment["space"]] += segment["nbytes"]
        # The arena and io of a bucket may be smaller than the largest bucket's.
        assert all(ends[s] == report["space_bytes"][s] for s in ("weights", "kv_pages"))
        assert all(ends[s] <= report["space_bytes"][s] for s in ends)
        sums = {space: sum(kinds.values()) for space, kinds in memory["totals"].items()}
        assert sums == ends
    code, out, _ = run("inspect", demo_bf16, "--memory")
    assert code == 0
    assert "memory of decode.b1" in out


def test_bench_reports_start_up_phases_and_the_rate_of_every_bucket(tiny_f32):
    done = k3c("bench", tiny_f32, "--repeat", 2, "--json")
    report = json.loads(done.stdout)
    assert report.keys() == {"startup_s", "buckets"}
    assert {"manifest", "verify", "plans", "memory", "kernels", "bind"} < set(report["startup_s"])
    assert [b["name"] for b in report["buckets"]] == [n for n in BUCKETS if "score" not in n]
    for bucket in report["buckets"]:
        assert 0 < bucket["min_ms"] <= bucket["median_ms"] <= bucket["max_ms"]
        assert bucket["tokens_per_s"] == pytest.approx(bucket["rows"] / bucket["median_ms"] * 1e3)
    assert "decode.b1" in k3c("bench", tiny_f32, "--repeat", 1).stdout


def test_bench_of_no_steps_is_refused(refuse, tiny_f32):
    assert "0 steps" in refuse(2, "ConfigError", "bench", tiny_f32, "--repeat", 0)
