import pytest
import torch

from k3c.codegen.templates.tvm.gather import TEMPLATES
from tests.support.kernel_runner import check, node

EMBED, GATHER = TEMPLATES
EXACT = 0.0  # a copy, or one rounding that both sides do alike
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("rows", [1, 3, 63, 100])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("act", DTYPES)
def test_embed_copies_the_rows_that_ids_name(rows, stored, act):
    table = torch.randn(97, 60).to(DTYPES[stored])
    ids = torch.randint(0, 97, (rows,), dtype=torch.int32)
    n = node("embed", [ids, table], [(act, rows, 60)])
    check(EMBED, n, [ids, table], EXACT, result_dtypes=(DTYPES[act],))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("width", [256, 51])
@pytest.mark.parametrize("act", DTYPES)
def test_gather_rows_copies_the_rows_that_the_index_names(rows, width, act):
    x = torch.randn(63, width).to(DTYPES[act])
    index = torch.randint(0, 63, (rows,), dtype=torch.int32)
    n = node("gather_rows", [x, index], [(act, rows, width)])
    check(GATHER, n, [x, index], EXACT)
