"""`k3c plan`: wrong requests answered at once with cause, numbers and what works; exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from k3c.planner.answer import answer_from_json
from tests.support.compiled import ROOT
from tests.support.drafts import PUBLISHED

K3 = ROOT / "tests/data/configs/kimi-k3-config.json"
DEMO = ROOT / "models/k3-demo"
LIMIT_S = 2.0  # an answer to a request that cannot work, process start included
RACK = ("--target", "gb300-nvl72")

DEGRADED = '[[degraded]]\nfabric = "nvlink"\nhosts = [7]\npaths_up = 9\n'

# Group, options, exit code, words: the cause, both numbers, the nearest thing that works.
WRONG = [
    ("MP01 more requests than state holds", (*RACK, "--mesh", "TEP16", "--max-num-seqs", "1024"), 3,
     ("1,024 requests of 8,192 tokens", "of 268.2 GiB", "largest legal --max-num-seqs is")),
    ("MP01 more tokens than pages hold",
     (*RACK, "--mesh", "TEP16", "--max-num-seqs", "64", "--max-model-len", "524288"), 3,
     ("64 requests of 524,288 tokens", "largest legal --max-num-seqs is", "--max-model-len")),
    ("a model too large for one device", ("--target", "h200"), 3,
     ("1,463.1 GiB of 140.4 GiB a rank", "the machine has 1")),
    ("a model too large for a machine", ("--target", "hgx-h200"), 3,
     ("of 140.4 GiB a rank", "the machine has 8")),
    ("a mesh larger than the machine", ("--target", "h200-x2", "--mesh", "TEP16"), 3,
     ("16 ranks, h200-x2 has 2", "--mesh tp=2,ep=2")),
    ("a mesh that divides nothing", (*RACK, "--mesh", "TEP10"), 2,
     ("96 KDA heads by tp=10", "nearest:", "tp=8,ep=8", "tp=12,ep=12")),
    ("a context longer than the model's", (*RACK, "--max-model-len", "2000000"), 2,
     ("2,000,000 tokens", "1,048,576 positions", "--max-model-len 1048576")),
    ("more requests than an artifact takes", (*RACK, "--max-num-seqs", "5000"), 2,
     ("5,000 is out of range", "1..4,095", "--max-num-seqs 4095")),
    ("no request", (*RACK, "--max-num-seqs", "0"), 2, ("0 is out of range", "1..4,095")),
    ("a prompt longer than a request", (*RACK, "--input-len", "9000"), 2,
     ("9,000 tokens in", "8,192", "--max-model-len")),
    ("an empty prompt", (*RACK, "--input-len", "0"), 2, ("found 0", "at least 1 each")),
    ("an unknown target", ("--target", "h300"), 2, ("'h300'", "known", "gb300-nvl72")),
    ("no target", (), 2, ("no target named", "--target gb300-nvl72")),
    ("an unknown goal", (*RACK, "--goal", "speed"), 2, ("'speed'", "latency, throughput, fit")),
    ("an unknown way to share", (*RACK, "--latent", "half"), 2,
     ("'half'", "auto, replicated or sharded")),
    ("a topology file that is not there", ("--target", "./no.toml"), 2, ("no.toml",)),
    ("a draft that is not there", (*RACK, "--draft", "no-such-draft"), 2, ("no-such-draft",)),
    ("more spare experts than experts", (*RACK, "--spare-slots", "1000"), 2,
     ("1,000 is out of range", "0..896")),
    ("a comparison with nothing", ("--compare", "nowhere.json", "nowhere.json"), 2,
     ("no such file", "nowhere.json")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "code", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_request_is_answered_with_cause_numbers_and_what_works(
    run, name, options, code, words
):
    found, out, err = run("plan", K3, *options)
    text = " ".join((out + err).split())
    assert found == code, text
    assert [word for word in words if word not in text] == [], text
    assert "Traceback" not in text


def test_a_request_that_cannot_fit_is_answered_in_two_seconds_without_torch():
    script = (
        "import sys; sys.argv = ['k3c', 'plan', *sys.argv[1:]]\n"
        "from k3c.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    options = (*RACK, "--mesh", "TEP16", "--max-num-seqs", "1024")
    command = [sys.executable, "-c", script, str(K3), *options]
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = getrusage(RUSAGE_CHILDREN)
    assert done.returncode == 3, done.stderr
    assert done.stdout.rstrip().endswith("False False")
    # Seconds of one core: other processes of a busy machine do not count.
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < LIMIT_S


def test_json_is_one_object_on_standard_output_and_the_exit_code_says_whether_it_fits(run):
    code, out, err = run("plan", K3, *RACK, "--mesh", "TP8", "--max-num-seqs", "2000", "--json")
    assert (code, err) == (3, "")
    answer = answer_from_json(out, "standard output")
    assert (answer.fits, answer.deployment.name) == (False, "TP8")
    assert answer.fullest.free_bytes < 0


def test_two_saved_answers_are_compared_without_a_model(run, tmp_path):
    for name, mesh in (("a", "TP8"), ("b", "TEP16")):
        _, out, _ = run("plan", K3, *RACK, "--mesh", mesh, "--max-num-seqs", "3000", "--json")
        (tmp_path / f"{name}.json").write_text(out)
    code, out, _ = run("plan", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert code == 3  # neither fits
    assert "TP8" in out
    assert "TEP16" in out


def test_a_draft_of_its_own_depth_is_planned_with_its_own_bytes(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    options = (*RACK, "--mesh", "TEP16", "--max-num-seqs", "1000", "--draft", tmp_path, "--json")
    _, out, _ = run("plan", K3, *options)
    answer = answer_from_json(out, "standard output")
    lines = {line.name: line for line in answer.fullest.lines}
    # 5 layers of 1,152 bytes, though the target has 93.
    assert lines["draft_kv"].nbytes == (1000 * 128 + 1) * 64 * 5 * 1152
    assert lines["draft_weights"].note.startswith("5 layers")
    assert lines["draft_records"].note.endswith("1 slot for padding of widths 1..8")
    assert answer.capacity.token_bytes == 27_648 + 5_760


def test_the_demo_fits_this_machine_and_its_plan_has_the_artifacts_bytes(run, demo_bf16, tmp_path):
    code, out, err = run("plan", DEMO, "--target", "cpu", "--json")
    assert code == 0, err
    answer = answer_from_json(out, "standard output")
    manifest = json.loads((demo_bf16 / "manifest.json").read_text())
    spaces = manifest["space_bytes"]
    lines = {line.name: line.nbytes for line in answer.fullest.lines}
    assert lines["weights"] == spaces["weights"]
    assert lines["activations"] == spaces["arena"]
    assert lines["io"] == spaces["io"]
    assert lines["mla_pages"] == spaces["kv_pages"]
    assert lines["kda_slots"] == spaces["state_slots"]
    assert answer.fullest.total_bytes == sum(spaces.values())
    assert [b.name for b in answer.buckets] == [b["name"] for b in manifest["buckets"]]


def test_a_topology_with_links_down_is_planned_with_a_warning(run, tmp_path):
    text = (ROOT / "k3c/targets/topologies/gb300-nvl72.toml").read_text()
    path = Path(tmp_path / "hurt.toml")
    path.write_text(text + "\n" + DEGRADED)
    _, out, err = run("plan", K3, "--target", path, "--mesh", "TEP16", "--max-num-seqs", "1024")
    text = " ".join((out + err).split())
    assert "host 7 (ranks 28..31): 9 of 18 nvlink paths are up" in text, text
    assert "a domain without the degraded ranks has 68 of 72 ranks" in text, text
