"""Checkpoints and golden values, each read once a session."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3c.model.text import TextModel

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/data/k3-tiny"
DEMO = ROOT / "models/k3-demo"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    # The tensors are small: a second thread costs more than it brings.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden():
    return load_file(TINY / "golden.safetensors")


@pytest.fixture(scope="session")
def tiny_ids(golden):
    return golden["input_ids"].tolist()


@pytest.fixture(scope="session")
def tiny32():
    return TextModel.from_checkpoint(TINY, torch.float32)


@pytest.fixture(scope="session")
def tiny64():
    return TextModel.from_checkpoint(TINY, torch.float64)


@pytest.fixture(scope="session")
def tiny16():
    return TextModel.from_checkpoint(TINY, torch.bfloat16)


@pytest.fixture(scope="session")
def demo32():
    return TextModel.from_checkpoint(DEMO, torch.float32)


@pytest.fixture(scope="session")
def demo_golden():
    return json.loads((DEMO / "golden.json").read_text())
