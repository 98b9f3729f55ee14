"""Builds: killed ones, repeated ones, and whether two of them differ."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from k3c.codegen.object_cache import cache_dir
from tests.support.compiled import DEMO, ROOT, k3c
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
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*.kernel")}


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


def warm_cache(artifact, folder):
    """Copy an artifact's kernels from the run's cache into a folder of their own."""
    for kernel in json.loads((artifact / "manifest.json").read_text())["kernels"]:
        name = f"{kernel['key'][:2]}/{kernel['key']}.kernel"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(cache_dir() / name, folder / name)
    return folder


def test_a_second_build_of_the_demo_builds_no_kernel_and_is_equal_byte_by_byte(demo_bf16, tmp_path):
    cache, again = warm_cache(demo_bf16, tmp_path / "cache"), tmp_path / "again"
    before = stamps(cache)
    k3c("compile", DEMO, "--target", "cpu", "-o", again, env={"K3C_CACHE_DIR": str(cache)})
    # A full cache hit: nothing was built, so nothing was stored.
    assert stamps(cache) == before
    first, second = contents(demo_bf16), contents(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert not any(str(place).encode() in b"".join(second.values()) for place in (tmp_path, ROOT))


@pytest.mark.slow
def test_a_build_without_a_cache_equals_one_with_it(demo_bf16, tmp_path):
    env = {"K3C_CACHE_DIR": str(tmp_path / "cache")}
    k3c("compile", DEMO, "--target", "cpu", "-o", tmp_path / "cold", env=env)
    assert contents(tmp_path / "cold") == contents(demo_bf16)
