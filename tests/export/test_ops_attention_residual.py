"""AttnRes: the mixture, its precision, and the schedule of blocks and restarts."""

import pytest
import torch

from k3c.export.ops import attn_res, bank_commit, residual_join
from k3c.model.config import TextConfig

EPS = 1e-5


def by_hand(sources, norm, proj):
    """The definition, one token and one source at a time, in float64."""
    sources = [s.double() for s in sources]
    out = torch.zeros_like(sources[0])
    for t in range(out.shape[0]):
        scores = [
            sum((s[t] / (s[t].square().mean() + EPS).sqrt()) * norm.double() * proj[0].double())
            for s in sources
        ]
        weights = torch.softmax(torch.stack(scores), 0)
        out[t] = sum(w * s[t] for w, s in zip(weights, sources, strict=True))
    return out


def sites(rows, tokens=5, width=64, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(rows)
    bank = (scale * torch.randn(rows + 1, tokens, width, generator=generator)).to(dtype)
    bank[rows:] = torch.nan
    prefix = torch.randn(tokens, width, generator=generator).to(dtype)
    vector = torch.float64 if dtype == torch.float64 else torch.float32
    norm = 1 + 0.25 * torch.randn(width, generator=generator).to(vector)
    proj = torch.randn(1, width, generator=generator).to(vector) / width**0.5
    return prefix, bank, norm, proj


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_scores_read_normalised_sources_and_the_mixture_raw_ones(rows):
    # Sources of very different size: mixing normalised values would change the result.
    prefix, bank, norm, proj = sites(rows, scale=30.0)
    want = by_hand([*bank[:rows], prefix], norm, proj)
    got = attn_res(prefix, bank, norm, proj, rows, EPS)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_one_source_is_the_identity():
    prefix, bank, norm, proj = sites(0, dtype=torch.bfloat16)
    assert torch.equal(attn_res(prefix, bank, norm, proj, 0, EPS), prefix)


def test_bf16_scores_are_computed_in_float32():
    prefix, bank, norm, proj = sites(3, tokens=100, width=256, dtype=torch.bfloat16)
    proj = 40 * proj
    want = by_hand([*bank[:3], prefix], norm, proj)
    got = attn_res(prefix, bank, norm, proj, 3, EPS).double()
    # One rounding to bf16 at the end is 2^-8 of each value; a bf16 score path is off by far more.
    assert float(((got - want).abs() / want.abs().clamp(min=1e-2)).max()) < 2**-8
    sources = torch.cat([bank[:3], prefix[None]])
    mean = sources.float().square().mean(-1, keepdim=True)
    normed = (sources.float() * torch.rsqrt(mean + EPS) * norm).bfloat16()
    lossy = torch.softmax((normed @ proj[0].bfloat16()).float(), 0)
    wrong = (lossy[..., None] * sources.float()).sum(0).double()
    assert float((wrong - want).abs().max()) > 4 * float((got - want).abs().max())


def test_a_restart_never_reads_the_prefix():
    nan, delta = torch.full((3, 4), torch.nan), torch.randn(3, 4)
    assert torch.equal(residual_join(nan, delta, 1), delta)
    assert torch.equal(residual_join(delta, delta, 0), 2 * delta)


def test_row_minus_one_commits_nothing():
    bank, prefix = torch.randn(3, 5, 4), torch.randn(5, 4)
    assert torch.equal(bank_commit(bank, prefix, -1), bank)
    assert torch.equal(bank_commit(bank, prefix, 2)[2], prefix)


def schedule(layers, block):
    """Attributes of a config of which only depth and block size matter."""
    config = object.__new__(TextConfig)
    object.__setattr__(config, "attn_res_block_size", block)
    object.__setattr__(config, "num_hidden_layers", layers)
    return config, [config.layer_attrs(i) for i in range(layers)]


def symbolic_sites(layers, block):
    """Walk the blocks with sets of names for tensors; yield (site, visible bank rows, prefix)."""
    config, every = schedule(layers, block)
    bank, prefix, pending = {}, None, {"embedding"}
    for i, attrs in enumerate(every):
        prefix = pending if attrs["attn_restart"] else prefix | pending
        yield f"attn {i}", [bank[r] for r in range(attrs["attn_rows"])], prefix
        if attrs["commit_row"] >= 0:
            bank[attrs["commit_row"]] = prefix
        delta = {f"attn_{i}"}
        prefix = delta if attrs["ffn_restart"] else prefix | delta
        yield f"ffn {i}", [bank[r] for r in range(attrs["ffn_rows"])], prefix
        pending = {f"ffn_{i}"}
    yield "readout", [bank[r] for r in range(config.num_blocks)], prefix | pending


def test_the_worked_example_with_blocks_of_three_and_seven_layers():
    seen = {site: (rows, prefix) for site, rows, prefix in symbolic_sites(7, 3)}
    row0 = {"embedding"}
    row1 = {f"{kind}_{i}" for kind in ("attn", "ffn") for i in (0, 1, 2)}
    row2 = {f"{kind}_{i}" for kind in ("attn", "ffn") for i in (3, 4, 5)}
    assert seen["attn 0"] == ([], row0)
    assert seen["attn 3"] == ([row0], row1)
    assert seen["ffn 3"] == ([row0, row1], {"attn_3"})
    five = {"attn_3", "ffn_3", "attn_4", "ffn_4", "attn_5"}
    assert seen["ffn 5"] == ([row0, row1], five)
    assert seen["ffn 6"] == ([row0, row1, row2], {"attn_6"})
    assert seen["readout"] == ([row0, row1, row2], {"attn_6", "ffn_6"})


def test_the_released_depth_commits_eight_blocks_and_reads_nine_sources():
    _, every = schedule(93, 12)
    starts = [i for i, attrs in enumerate(every) if attrs["commit_row"] >= 0]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84]
    *_, (_, rows, prefix) = symbolic_sites(93, 12)
    assert len(rows) == 8
    assert prefix == {f"{kind}_{i}" for kind in ("attn", "ffn") for i in range(84, 93)}
