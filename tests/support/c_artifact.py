"""A whole artifact on disk whose two kernels are written in C: the fake model of `fake_plan`.

It is loaded, verified and run like a compiled one, without TVM in the process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3c.artifact import Arg, Command, Plan
from k3c.artifact_writer import ArtifactWriter
from tests.support.artifacts import cpu_kernel
from tests.support.c_kernels import compile_c, tvm_library_folder
from tests.support.fake_plan import PRIME, Sizes, make_buckets, make_manifest, make_plan

MODEL_IN = ("ids", "seg_start", "seg_tokens", "slots", "context")
MODEL_OUT = ("tokens", "logits")
WEIGHT_BYTES = 128

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
typedef struct { int32_t type_index, padding; union { int64_t i; char *p; } v; } Any;

/* ids, seg_start, seg_tokens, slots, context, tokens, logits, state, weight; segments, vocab */
int __tvm_ffi_model(void *self, Any *a, int32_t n, Any *result) {
  int32_t *ids = (int32_t *)a[0].v.p, *start = (int32_t *)a[1].v.p, *count = (int32_t *)a[2].v.p;
  int32_t *slots = (int32_t *)a[3].v.p, *context = (int32_t *)a[4].v.p;
  int32_t *tokens = (int32_t *)a[5].v.p;
  float *logits = (float *)a[6].v.p;
  int64_t *state = (int64_t *)a[7].v.p, segments = a[9].v.i, vocab = a[10].v.i;
  if (n != 11 || a[8].v.p[0] != 1) return -1;
  for (int64_t s = 0; s < segments; ++s) {
    if (count[s] == 0) continue;
    int64_t *slot = state + 2 * slots[s], value = context[s] ? slot[1] : 0;
    for (int t = 0; t < count[s]; ++t) value = (value * 31 + ids[start[s] + t] + 1) % PRIME;
    slot[0] = context[s] + count[s];
    slot[1] = value;
    tokens[s] = value % vocab;
    for (int64_t v = 0; v < vocab; ++v) logits[s * vocab + v] = -llabs(v - tokens[s]);
  }
  return 0;
}

/* ids, targets, state, logprobs; rows */
int __tvm_ffi_scores(void *self, Any *a, int32_t n, Any *result) {
  int32_t *ids = (int32_t *)a[0].v.p, *targets = (int32_t *)a[1].v.p;
  float *logprobs = (float *)a[3].v.p;
  for (int64_t t = 0; t < a[4].v.i; ++t) logprobs[t] = -(ids[t] + targets[t] / 128.0f);
  return 0;
}
"""


def with_commands(plan: Plan, vocab: int) -> Plan:
    """Give a fake plan its one command and its entry function's name."""
    entry = "entry_" + plan.bucket.name.replace(".", "_")
    weight = replace(plan.buffers[1], id="weight", nbytes=64, space="weights", offset=64)
    buffers = (*plan.buffers, weight)
    if plan.bucket.phase == "score":
        # The state is named though not needed: all plans must agree on where it lies.
        reads = ("ids", "targets", "layer.state")
        args = [Arg(buffer=b) for b in (*reads, "logprobs")]
        args.append(Arg(value=plan.bucket.dims["T"]))
        command = Command("launch", "scores", tuple(args), reads, ("logprobs",), "scores")
    else:
        names = (*MODEL_IN, *MODEL_OUT, "layer.state", "weight")
        args = [Arg(buffer=name) for name in names]
        args += [Arg(value=plan.bucket.dims["B"]), Arg(value=vocab)]
        writes = (*MODEL_OUT, "layer.state")
        command = Command(
            "launch", "model", tuple(args), (*MODEL_IN, "layer.state", "weight"), writes, "model"
        )
    space_bytes = {**plan.space_bytes, "weights": WEIGHT_BYTES}
    commands = {"layer": (command,)}
    return replace(plan, space_bytes=space_bytes, buffers=buffers, commands=commands, entry=entry)


def entry_source(plan: Plan) -> str:
    """Return the C entry function of a plan: what the code generator does, for these plans only."""
    buffers, spaces = {b.id: b for b in plan.buffers}, list(plan.space_bytes)
    order = ("weights", "arena", "kv_pages", "state_slots", "io")
    assert set(spaces) == set(order)
    lines = [f"int __tvm_ffi_{plan.entry}(void *self, Any *s, int32_t n, Any *result) {{"]
    for call in plan.calls:
        for command in plan.commands[call.graph]:
            lines.append(f"  {{ Any a[{len(command.args)}];")
            for i, arg in enumerate(command.args):
                if arg.buffer:
                    b = buffers[arg.buffer]
                    offset = b.offset + (call.bases[b.space] if b.per_layer else 0)
                    lines.append(f"  a[{i}].v.p = s[{order.index(b.space)}].v.p + {offset};")
                else:
                    lines.append(f"  a[{i}].v.i = {arg.value};")
            call_c = f"__tvm_ffi_{command.kernel}(0, a, {len(command.args)}, result)"
            lines.append(f"  if ({call_c}) return -1; }}")
    return "\n".join([*lines, "  return 0;", "}"])


def write_artifact(folder: Path, target_features: tuple[str, ...] = ()) -> Path:
    """Write the artifact to `folder / "artifact"` and return that path."""
    sizes = Sizes()
    manifest = make_manifest(sizes, make_buckets(sizes))
    plans = [
        with_commands(make_plan(b, sizes), manifest.model.vocab_size) for b in manifest.buckets
    ]
    libraries = tvm_library_folder(folder / "tvm")
    source = "\n".join([f"#define PRIME {PRIME}", SOURCE, *map(entry_source, plans)])
    kernels = compile_c(folder, source, libraries)
    with ArtifactWriter(folder / "artifact") as writer:
        for plan in plans:
            writer.add_plan(plan)
        for library in sorted(libraries.iterdir()):
            writer.add_file(f"lib/{library.name}", library)
        writer.add_file("kernels.so", kernels)
        weights = writer.start_weights(WEIGHT_BYTES)
        weights.write_at(64, bytes([1]) * 64)
        writer.end_weights(weights)
        space_bytes = {s: max(p.space_bytes[s] for p in plans) for s in plans[0].space_bytes}
        names = ("model", "scores")
        writer.finish(
            replace(
                manifest,
                target=replace(manifest.target, features=target_features),
                kernels=tuple(map(cpu_kernel, names)),
                space_bytes=space_bytes,
            )
        )
    return folder / "artifact"
