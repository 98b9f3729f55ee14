"""Builds: killed ones, repeated ones, and whether two of them differ."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.compiled import ROOT, compile_artifact, k3c
from tests.support.tiny_checkpoint import write_toy

WAIT_S = 300


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "model"
    write_toy(folder)
    return folder


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stamps(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def kill_in_mid_compile(model, output, cache):
    """Start a compile with an empty cache and kill it, with its children, among the kernels."""
    command = [sys.executable, "-m", "k3c", "compile", str(model), "--target", "cpu"]
    process = subprocess.Popen(
        [*command, "-o", str(output)],
        cwd=ROOT,
        env={**os.environ, "K3C_CACHE_DIR": str(cache)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + WAIT_S
    while len(list(cache.rglob("*.kernel"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < end, "no kernel was compiled"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


# A minute: it compiles every kernel of the toy again, in a cache of its own.
@pytest.mark.slow
def test_a_killed_build_leaves_nothing_and_later_builds_are_equal_byte_by_byte(toy, tmp_path):
    output, cache = tmp_path / "out", tmp_path / "cache"
    kill_in_mid_compile(toy, output, cache)
    assert not output.exists()
    env = {"K3C_CACHE_DIR": str(cache)}
    k3c("compile", toy, "--target", "cpu", "-o", output, env=env)
    damaged = min(cache.rglob("*.kernel"))
    damaged.write_bytes(damaged.read_bytes()[:-5])
    before = stamps(cache)
    k3c("compile", toy, "--target", "cpu", "-o", tmp_path / "again", env=env)
    after = stamps(cache)
    # A full cache hit but for the damaged entry: nothing else was built, so nothing was stored.
    assert {path for path in after if after[path] != before.get(path)} == {damaged}
    # The two differ in their place, and in how much of the cache was there.
    assert contents(output) == contents(tmp_path / "again")


def test_two_builds_of_the_demo_are_equal_byte_by_byte(demo_bf16, tmp_path):
    from tests.support.compiled import DEMO

    again = compile_artifact(DEMO, tmp_path / "again")
    first, second = contents(demo_bf16), contents(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert str(tmp_path).encode() not in b"".join(second.values())
    assert str(ROOT).encode() not in b"".join(second.values())


@pytest.mark.slow
def test_a_build_without_a_cache_equals_one_with_it(demo_bf16, tmp_path):
    from tests.support.compiled import DEMO

    env = {"K3C_CACHE_DIR": str(tmp_path / "cache")}
    k3c("compile", DEMO, "--target", "cpu", "-o", tmp_path / "cold", env=env)
    assert contents(tmp_path / "cold") == contents(demo_bf16)
