"""Steps of peers: what they are made of, and what users see of them."""

import pytest

from k3c.planner.estimate import KindEstimate, StepEstimate
from k3c.planner.peers import LAYERS, PeerStep, early_start_us, peer_part, peer_step, profile
from k3c.planner.public import smallest_us
from k3c.planner.serving import Wave, serve
from k3c.targets.topology import load_topology

B300 = load_topology("hgx-b300")


def step(tokens=1, context=8192, phase="decode", tp=8, ep=1):
    return PeerStep(phase, tokens, context, tp, ep)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_step_has_all_layers_and_its_kinds_sum_to_it(name):
    found = peer_step(profile(name), step(), B300)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert kinds["kda_decode"].launches == LAYERS["kda"] == 69
    assert kinds["mla_decode"].launches == LAYERS["mla"] == 24
    assert kinds["moe"].launches == LAYERS["moe"] == 92
    assert found.us == pytest.approx(sum(kind.us for kind in found.kinds))
    assert found.low_us < found.us < found.high_us


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_more_requests_and_longer_contexts_never_take_less_time(name):
    def us(**shape):
        return peer_step(profile(name), step(**shape), B300).us

    batches = [us(tokens=n) for n in (1, 2, 8, 16, 32, 64)]
    assert batches == sorted(batches)
    contexts = [us(context=n) for n in (1024, 4096, 8192, 60000, 131072)]
    assert contexts == sorted(contexts)
    prompts = [us(tokens=n, context=n, phase="prefill") for n in (1024, 2048, 8192)]
    assert prompts == sorted(prompts)


def test_the_shorter_of_two_streams_hides_behind_the_longer():
    kinds = [kind.kind for kind in peer_part(profile("sglang"), "moe", step(), B300)]
    # The input projection and the up-projection remain; the shared experts' own GEMM is hidden.
    assert kinds.count("gemm") == 2
    assert kinds.count("moe") == 1


def test_a_row_that_is_left_out_is_replaced_by_what_it_is_made_of():
    used = [kind.kind for kind in peer_part(profile("vllm"), "moe", step(), B300)]
    assert "moe_tail" in used
    assert "all_gather" not in used
    without = profile("vllm", frozenset({"vllm blog"}))
    found = [kind.kind for kind in peer_part(without, "moe", step(), B300)]
    assert "moe_tail" not in found
    assert {"all_reduce", "all_gather"} <= set(found)
    # In a prefill step it is made of them anyway.
    prefill = step(phase="prefill", tokens=2048)
    assert peer_step(without, prefill, B300) == peer_step(profile("vllm"), prefill, B300)


def test_a_launch_that_starts_early_saves_what_ours_do():
    saved, off = early_start_us()
    # perf/log.md, seven launches alone and with an early start: 0.7 to 2.4 us.
    assert 0.7 < saved < 2.4
    assert 0 < off < 1
    plain = peer_part(profile("sglang"), "kda", step(), B300)
    kernel = next(kind for kind in plain if kind.kind == "kda_decode")
    assert kernel.us == pytest.approx(8.5 - saved / 2)
    assert kernel.high_us > 8.5


def test_what_has_no_public_row_costs_the_shortest_public_launch():
    assert smallest_us("gb300") == 2.2  # the forget projection of 12 heads
    parts = peer_part(profile("sglang"), "mla", step(phase="prefill", tokens=2048), B300)
    small = [kind.us for kind in parts if kind.kind == "small"]
    assert small == [2 * 2.2, 2.2]


def estimate(us):
    kind = KindEstimate("linear", us, us / 2, us * 2, 0, 1, "x")
    return StepEstimate(us, us / 2, us * 2, (kind,))


def test_one_request_waits_for_nobody():
    found = serve(estimate(10_000), [estimate(100_000), estimate(200_000)], Wave(1, 1024, 8))
    assert (found.ttft_us.value, found.ttft_us.low, found.ttft_us.high) == (3e5, 1.5e5, 6e5)
    assert found.tpot_us.value == 10_000
    assert (found.user.value, found.user.low, found.user.high) == (100, 50, 200)
    assert found.gpu.value == pytest.approx(100 / 8)


def test_a_wave_waits_for_half_of_its_other_prompts():
    # 11 requests, 101 tokens: 5 prompts of 200 ms in 100 tokens are 10 ms a token.
    found = serve(estimate(10_000), [estimate(200_000)], Wave(11, 101, 1))
    assert found.tpot_us.value == pytest.approx(20_000)
    assert found.gpu.value == pytest.approx(11 * 50)


def test_speculation_divides_by_the_length_that_is_stated():
    plain = serve(estimate(12_000), [estimate(1)], Wave(1, 100, 1))
    drafted = serve(estimate(12_000), [estimate(1)], Wave(1, 100, 1, accepted=3.0))
    assert drafted.tpot_us.value == pytest.approx(plain.tpot_us.value / 3)


def test_data_parallel_ranks_add_up():
    one = serve(estimate(10_000), [estimate(1)], Wave(4, 100, 16))
    both = serve(estimate(10_000), [estimate(1)], Wave(4, 100, 16, data_ranks=2))
    assert both.gpu.value == pytest.approx(2 * one.gpu.value)
    assert both.user == one.user
