"""The cache of exported models: what its key covers, and what a hit spares."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3c.codegen.object_cache import cache_dir
from k3c.export.exporter import export_model
from k3c.export_cache import KIND, SOURCES, export_key, exported, source_digest
from k3c.ir.text import show
from k3c.model.checkpoint import Checkpoint
from k3c.model.config import load_config
from tests.support.compiled import ROOT, TINY

CONFIG = load_config(TINY)

HIT = """
import sys
from pathlib import Path
from k3c.export_cache import exported
from k3c.ir.text import show
from k3c.model.config import load_config

text = show(exported(load_config(Path(sys.argv[1])), "f32"))
loaded = {name.partition(".")[0] for name in sys.modules}
slow = sorted(loaded & {"torch", "triton", "tvm", "numpy"})
assert not slow, slow
sys.stdout.write(text)
"""


@pytest.fixture(scope="module")
def fresh():
    return export_model(CONFIG, "f32")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3C_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_hit_is_the_exported_module_and_imports_no_torch(fresh, own_cache):
    assert exported(CONFIG, "f32") == fresh
    command = [sys.executable, "-c", HIT, str(TINY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == show(fresh)


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b"\0" * len(b), lambda b: b""])
def test_a_damaged_entry_is_exported_again(fresh, own_cache, damage):
    exported(CONFIG, "f32")
    (entry,) = own_cache.rglob(f"*.{KIND}")
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert exported(CONFIG, "f32") == fresh
    assert entry.read_bytes() == whole
    assert cache_dir() == own_cache


def test_the_key_covers_the_configuration_the_types_and_the_pages():
    tiny, mini = Checkpoint(TINY, CONFIG), replace(CONFIG, rms_norm_eps=1e-6)
    keys = [
        export_key(CONFIG, "f32", 16),
        export_key(mini, "f32", 16),
        export_key(CONFIG, "bf16", 16),
        export_key(CONFIG, "f32", 64),
        export_key(CONFIG, "f32", 16, tiny),
    ]
    assert len(set(keys)) == len(keys)
    assert export_key(load_config(TINY), "f32", 16) == keys[0]


@pytest.mark.parametrize("folder", SOURCES)
def test_the_key_covers_every_source_that_the_text_depends_on(tmp_path, folder):
    for name in SOURCES:
        shutil.copytree(ROOT / "k3c" / name, tmp_path / name)
    before = source_digest(tmp_path)
    assert before == source_digest()
    source_digest.cache_clear()
    changed = min(path for path in (tmp_path / folder).rglob("*.py") if path.stat().st_size)
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert source_digest(tmp_path) != before
    source_digest.cache_clear()


def test_a_read_only_cache_only_means_that_nothing_is_kept(fresh, tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.write_text("no folder")
    monkeypatch.setenv("K3C_CACHE_DIR", str(place))
    assert exported(CONFIG, "f32") == fresh
    assert Path(place).read_text() == "no folder"
