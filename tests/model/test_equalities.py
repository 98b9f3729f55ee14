"""Ways to compute one thing that must agree: chunks, batches, forms, snapshots, heads."""

import pytest
import torch

from k3c.model.ends import Head, Prologue, ScoreHead
from k3c.model.options import ModelOptions
from k3c.model.text import Probe, Step, TextModel
from tests.model.conftest import TINY
from tests.support.closeness import relative_error

# Different orders of float32 summation through nine layers: measured about 5e-6.
F32 = 3e-5


@pytest.fixture(scope="module")
def full32(tiny32, tiny_ids):
    return tiny32.logits(tiny_ids)


def run_chunks(model, ids, cuts, **options):
    """Run `ids` cut at `cuts`; return all logits and the states at the cuts and the end."""
    state, parts, states = model.new_state(1, len(ids)), [], []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        (logits,), state = model([ids[start:stop]], state, **options)
        parts.append(logits)
        states.append(state)
    return torch.cat(parts), states


@pytest.mark.parametrize("cuts", [[1, 2, 5, 64, 67, 100, 129], [16, 48], [63]], ids=str)
def test_chunked_prefill_equals_one_piece_at_any_cut(tiny32, tiny_ids, full32, cuts):
    assert relative_error(run_chunks(tiny32, tiny_ids, cuts)[0], full32) < F32


def test_prefill_and_single_steps_equal_one_piece(tiny32, tiny_ids, full32):
    logits, _ = run_chunks(tiny32, tiny_ids, list(range(110, 130)))
    assert relative_error(logits, full32) < F32


def test_chunk_size_and_mla_form_do_not_matter(tiny64, tiny_ids):
    forms = ModelOptions(kda_chunk=0, expanded_mla=True)
    other = TextModel.from_checkpoint(TINY, torch.float64, forms)
    ids = tiny_ids[:70]
    # float64: only a different function could exceed this.
    assert relative_error(other.logits(ids), tiny64.logits(ids)) < 1e-11


def test_requests_in_one_step_equal_each_alone_with_padding_rows(tiny32, tiny_ids):
    prompts = [tiny_ids[:37], tiny_ids[40:41], tiny_ids[50:113], tiny_ids[113:116]]
    state = tiny32.new_state(len(prompts), 80)
    together, state = tiny32(prompts, state, padding_rows=5)
    steps = [[7], [8], [], [9]]
    after, state = tiny32(steps, state, padding_rows=3)
    for s, prompt in enumerate(prompts):
        alone, own = tiny32([prompt], tiny32.new_state(1, 80))
        assert relative_error(together[s], alone[0]) < F32
        if steps[s]:
            next_alone, own = tiny32([steps[s]], own)
            assert relative_error(after[s], next_alone[0]) < F32
        assert relative_error(state.cache_rows(3, s), own.cache_rows(3, 0)) < F32


def test_padding_rows_change_no_state_bit(tiny32, tiny_ids):
    prompts = [tiny_ids[:9], tiny_ids[9:14]]
    runs = [tiny32(prompts, tiny32.new_state(2, 32), padding_rows=n)[1] for n in (0, 7)]
    for plain, padded in zip(runs[0].layers, runs[1].layers, strict=True):
        for name, tensor in plain.items():
            same = (tensor - padded[name]).abs().nan_to_num()
            # Row counts change how a matrix product sums; a padding row's effect would be order 1.
            assert float(same.max()) < F32 * float(tensor.nan_to_num().abs().max())
            assert torch.equal(tensor.isnan(), padded[name].isnan())
            assert padded[name][0].isnan().all()


def test_a_snapshot_continued_twice_gives_equal_bits(tiny32, tiny_ids):
    _, snapshot = tiny32([tiny_ids[:64]], tiny32.new_state(1, 130))
    first, end1 = tiny32([tiny_ids[64:]], snapshot)
    second, end2 = tiny32([tiny_ids[64:]], snapshot)
    assert torch.equal(first[0], second[0])
    for one, two in zip(end1.layers, end2.layers, strict=True):
        assert all(torch.equal(one[n].nan_to_num(), two[n].nan_to_num()) for n in one)


def test_a_boundary_snapshot_holds_the_boundary_and_its_convolution_rows(tiny32, tiny_ids, full32):
    _, states = run_chunks(tiny32, tiny_ids, [128])
    boundary, end = states
    (again,), _ = tiny32([tiny_ids[128:]], boundary)
    assert relative_error(again, full32[128:]) < F32
    (late,), _ = tiny32([tiny_ids[128:]], end)
    assert relative_error(late, full32[128:]) > 0.01
    forgotten = [
        {n: torch.zeros_like(t) if n == "conv_state" else t for n, t in layer.items()}
        for layer in boundary.layers
    ]
    (wrong,), _ = tiny32([tiny_ids[128:]], boundary.advance(tuple(forgotten), [0]))
    assert relative_error(wrong, full32[128:]) > 0.01


def ends_inputs(model, ids):
    """Run the backbone by hand up to the readout's inputs."""
    captured = {}
    readout = model.model.readout
    model.model.readout = lambda **carry: captured.update(carry) or readout(**carry)
    try:
        model([ids], model.new_state(1, len(ids)))
    finally:
        del model.model.readout
    captured["attn_restart"] = captured.pop("restart")
    captured["attn_rows"] = captured.pop("rows")
    return captured


def load(module, model):
    named = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    module.load_state_dict({k: named[k] for k in module.state_dict()}, assign=True)
    return module


def test_exported_ends_agree_with_the_whole_model(tiny32, tiny_ids):
    ids, options = tiny_ids[:12], tiny32.options
    want = tiny32.logits(ids)
    (pending,) = load(Prologue(tiny32.config, options), tiny32)(torch.tensor(ids))
    assert torch.equal(pending, tiny32.model.embed_tokens(torch.tensor(ids)))
    carry = ends_inputs(tiny32, ids)
    rows = torch.tensor([11, 3], dtype=torch.int32)
    zero = torch.zeros(2)
    parameters = (zero, zero.int(), zero + 1, zero, zero.long(), zero.int())
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    sampling = dict(zip(names, parameters, strict=True))
    head = load(Head(tiny32.config, options), tiny32)
    tokens, logits = head(**carry, sample_rows=rows, **sampling)
    assert relative_error(logits, want[rows.long()]) < F32
    assert tokens.tolist() == want[rows.long()].argmax(-1).tolist()
    targets = torch.tensor([*ids[1:], -1], dtype=torch.int32)
    (logprobs,) = load(ScoreHead(tiny32.config, options), tiny32)(**carry, targets=targets)
    expected = torch.log_softmax(want, -1)[torch.arange(11), targets[:11].long()]
    assert relative_error(logprobs[:11], expected) < F32
    assert logprobs[11] == 0


def test_a_step_leaves_the_old_state_valid(tiny32, tiny_ids):
    start = tiny32.new_state(1, 16)
    tiny32.run(Step.pack([tiny_ids[:8]], 0), start, Probe())
    assert all(t.isnan().all() for layer in start.layers for t in layer.values())
