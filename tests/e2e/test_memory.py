"""What is planned is what is allocated, on real artifacts."""

import ctypes

import numpy as np
import pytest

from k3c.artifact import SPACES
from tests.support.compiled import WatchedEngine, libraries_of, open_loaded

ARTIFACTS = ("demo_f32", "demo_bf16", "tiny_f32")
ALLOC = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int
)


@pytest.fixture(params=ARTIFACTS)
def loaded(request):
    return open_loaded(request.getfixturevalue(request.param))


def test_every_space_is_allocated_with_exactly_its_planned_bytes(loaded):
    plans = [bucket.plan for bucket in loaded.buckets.values()]
    for space in SPACES:
        planned = max(plan.space_bytes[space] for plan in plans)
        assert loaded.memory[space].nbytes == planned == loaded.manifest.space_bytes[space]


def largest_live_set(plan):
    """Bytes of the arena live at one time, from what the commands touch; carries are always live.

    Graphs never overlap in time, so the largest graph decides.
    """
    sizes = {b.id: b.nbytes for b in plan.buffers if b.space == "arena"}
    carried = sum(b.nbytes for b in plan.buffers if b.space == "arena" and not b.graph)
    largest = 0
    for commands in plan.commands.values():
        touched = [[i for i in (*c.reads, *c.writes) if i in sizes] for c in commands]
        own = {b.id for b in plan.buffers if b.graph}
        spans = {}
        for index, names in enumerate(touched):
            for name in names:
                if name in own:
                    spans[name] = (spans.get(name, (index,))[0], index)
        for index in range(len(commands)):
            live = sum(sizes[n] for n, (a, b) in spans.items() if a <= index <= b)
            largest = max(largest, live)
    return carried + largest


def test_the_arena_of_every_plan_is_at_most_a_twentieth_over_its_lower_bound(loaded):
    for name, bucket in loaded.buckets.items():
        plan = bucket.plan
        bound = largest_live_set(plan)
        assert plan.space_bytes["arena"] <= 1.05 * bound, name
        # The plan's own bound counts buffers at their aligned sizes.
        assert bound <= plan.arena_lower_bound_bytes <= plan.space_bytes["arena"]


def test_no_kernel_allocates_while_it_runs(loaded):
    """MP09: workspaces are in the plan, so nothing else may ask for memory."""
    asked = []
    libraries = libraries_of(loaded)
    real = ALLOC(ctypes.cast(libraries._runtime.TVMBackendAllocWorkspace, ctypes.c_void_p).value)

    def count(device_type, device, nbytes, code, bits):
        asked.append(nbytes)
        return real(device_type, device, nbytes, code, bits)

    callback = ALLOC(count)
    pointers = []
    for library in libraries._kernels:
        try:
            pointers.append(ctypes.c_void_p.in_dll(library, "__TVMBackendAllocWorkspace"))
        except ValueError:
            # Nothing in this library can ask.
            continue
    before = [pointer.value for pointer in pointers]
    for pointer in pointers:
        pointer.value = ctypes.cast(callback, ctypes.c_void_p).value
    engine = WatchedEngine(loaded)
    random = np.random.default_rng(1)
    vocab = loaded.manifest.model.vocab_size
    try:
        engine.generate(random.integers(0, vocab, (8, 40)).tolist(), 4, temperature=1.0, top_k=5)
        engine.score(random.integers(0, vocab, (2, 70)).tolist())
    finally:
        for pointer, value in zip(pointers, before, strict=True):
            pointer.value = value
    assert asked == []
