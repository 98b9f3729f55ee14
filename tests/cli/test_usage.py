"""Help, versions, wrong arguments, and what an error of ours looks like."""

import json
import subprocess
import sys

import pytest

from k3c import __version__, cli
from tests.support.compiled import ROOT, k3c

VERBS = ("export", "compile", "generate", "eval", "inspect", "bench", "doctor", "topology")


def test_help_lists_every_verb_and_exits_with_0():
    done = k3c("--help")
    assert all(verb in done.stdout for verb in VERBS)
    assert done.stderr == ""


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(run, verb):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert verb in out


def test_help_loads_neither_torch_nor_tvm_nor_numpy():
    code = (
        "import sys; sys.argv = ['k3c', '--help']\n"
        "from k3c import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stderr.split()) & {"torch", "tvm", "tvm_ffi", "numpy", "networkx"}


def test_version_is_printed(run):
    assert run("--version") == (0, f"k3c {__version__}\n", "")


def test_no_arguments_print_help_and_wrong_ones_exit_with_2(run):
    code, out, err = run()
    assert code == 2
    assert "Usage" in out + err
    for args in (["fly"], ["compile", "model"], ["generate", "dir", "--max-tokens", "many"]):
        code, _, err = run(*args)
        assert code == 2
        assert "Traceback" not in err


def test_our_own_fault_is_one_line_with_exit_code_1_and_a_traceback_only_with_debug(
    run, monkeypatch
):
    def broken(*args):
        raise RuntimeError("wires crossed")

    monkeypatch.setattr("k3c.doctor.run_doctor", broken)
    code, out, err = run("doctor")
    assert (code, out) == (1, "")
    assert err == "error[RuntimeError]: wires crossed; rerun with --debug\n"
    with pytest.raises(RuntimeError, match="wires crossed"):
        run("--debug", "doctor")


def test_a_missing_compiler_package_is_an_environment_error_with_the_command_that_gets_it(
    refuse, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "k3c.compile", None)
    original = cli._as_k3c_error

    # None in sys.modules raises ModuleNotFoundError with the name of our own module.
    def renamed(exc):
        exc.name = "torch"
        return original(exc)

    monkeypatch.setattr(cli, "_as_k3c_error", renamed)
    line = refuse(5, "DeviceFault", "compile", tmp_path, "--target", "cpu", "-o", tmp_path / "x")
    assert "torch" in line
    assert "pip install 'k3c-compiler[cpu]'" in line


def test_doctor_lists_versions_features_and_what_is_missing(run):
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["packages"]["torch"][0].isdigit()
    assert {"avx2", "fma"} <= set(report["cpu_features"])
    assert report["missing"] == []
    code, out, _ = run("doctor")
    assert code == 0
    assert "nothing is missing" in out
