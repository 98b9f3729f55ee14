"""Plans of exported models, down to the full-size K3: bounds, launches, no copies, agreement."""

from pathlib import Path

import pytest

from k3c.artifact import Bucket
from k3c.export.exporter import export_model
from k3c.model.config import load_config
from k3c.passes import build_plan, schedule, select_kernels
from k3c.passes.context import PassContext
from k3c.passes.pipeline import run_pipeline
from k3c.passes.weight_table import weight_table
from k3c.plan_check import check_together
from tests.support.plan_modules import TARGET, FakeTemplate, catalogue, kernel_symbol, packed_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ("models/k3-demo", "tests/data/configs/kimi-k3-config.json")
STATE = {"S": 9, "P": 4097, "M": 512}
LEFT_OVER = ("add", "sigmoid_mul", "situ", "rms_norm", "combine", "cast")


def buckets():
    decode = [Bucket(f"decode.b{n}", "decode", {"T": n, "B": n, **STATE}) for n in (1, 2, 4, 8)]
    rows = [("prefill", 16), ("prefill", 64), ("prefill", 256), ("score", 64)]
    return [*decode, *(Bucket(f"{p}.t{n}", p, {"T": n, "B": 8, **STATE}) for p, n in rows)]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_bucket_of_an_exported_model_plans_within_the_bound(config):
    templates = catalogue(*(FakeTemplate(op, f"{op}_left") for op in LEFT_OVER))
    module = export_model(load_config(ROOT / config), "bf16", None)
    kernels = run_pipeline(module, PassContext(TARGET, templates)).module
    selections = [select_kernels.run(kernels, b, templates, TARGET) for b in buckets()]
    weights = weight_table(selections, packed_bytes)
    plans = [build_plan.run(schedule.run(s), weights, kernel_symbol) for s in selections]
    assert check_together(plans) == []
    for plan in plans:
        assert plan.space_bytes["arena"] <= 1.05 * plan.arena_lower_bound_bytes
        assert all(c.kind == "launch" for cs in plan.commands.values() for c in cs)
        in_step = sum(len(plan.commands[call.graph]) for call in plan.calls)
        assert plan.estimates["launches"] == in_step
