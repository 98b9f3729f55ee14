"""A small K3-shaped module at level kernel, and templates that need no code generator."""
# ruff: noqa: E501, ANN -- IR text has one node per line.

from __future__ import annotations

from dataclasses import dataclass

from k3c.artifact import Bucket, Plan
from k3c.ir.graph import LayerAttr, Module
from k3c.ir.refusal import Refusal
from k3c.ir.text import parse
from k3c.passes import build_plan, schedule, select_kernels
from k3c.passes.weight_table import weight_table
from k3c.targets.catalogue import Catalogue, Cost, Stage
from k3c.targets.target import load_target

TARGET = load_target("cpu-avx2")
STATE = {"S": 5, "P": 9, "M": 4}
_SEGMENTS = "io %seg_start: i32[B], io %seg_tokens: i32[B], io %slots: i32[B], io %context: i32[B]"
_CARRY = "carry %prefix: bf16[T, 96], carry %pending: bf16[T, 96], carry %bank: bf16[2, T, 96]"
_SITE = "{eps: 1e-05, res_eps: 1e-05, restart: layer.attn_restart, rows: layer.attn_rows, "
_SITE += "commit_row: layer.commit_row}"
_FFN_SITE = "{commit_row: -1, eps: 1e-05, res_eps: 1e-05, restart: layer.ffn_restart, "
_FFN_SITE += "rows: layer.ffn_rows}"


def _weights(*lines: str) -> str:
    pairs = [line.split(": ") for line in lines]
    return "\n".join(f'  weight %{name}: {kind} from "layers.*.{name}"' for name, kind in pairs)


_NORMS = ("a_res: f32[96]", "a_proj: f32[1, 96]", "a_norm: f32[96]")
_FNORMS = ("m_res: f32[96]", "m_proj: f32[1, 96]", "m_norm: f32[96]")
_KDA = ("w_in: bf16[482, 96]", "cq: f32[96, 4]", "ck: f32[96, 4]", "cv: f32[96, 4]")
_KDA += ("a_log: f32[2]", "dt: f32[96]", "o_norm: f32[48]", "w_o: bf16[96, 96]")

_KDA_BODY = f"""
  %p1, %y1, %b1 = attn_res_norm(%prefix, %pending, %bank, %a_res, %a_proj, %a_norm) {_SITE} : bf16[T, 96], bf16[T, 96], bf16[2, T, 96]
  %q, %k, %v, %z, %f, %b = linear(%y1, %w_in) {{beta: 0.0, epilogues: (none, none, none, none, none, none), linear_beta: none}} : bf16[T, 96], bf16[T, 96], bf16[T, 96], bf16[T, 96], bf16[T, 96], bf16[T, 2]
  %o, %cs, %ks = kda(%q, %k, %v, %z, %f, %b, %cq, %ck, %cv, %a_log, %dt, %o_norm, %conv_state, %kda_state, %seg_start, %seg_tokens, %slots, %context) {{chunk: 16, eps: 1e-05, heads: 2, l2_eps: 1e-06, lower_bound: none, scale: 0.14}} : bf16[T, 96], bf16[S, 3, 288], f32[S, 2, 48, 48]
  %d = linear(%o, %w_o) {{beta: 0.0, epilogues: (none), linear_beta: none}} : bf16[T, 96]
"""
_KDA_STATE = "state %conv_state: bf16[S, 3, 288], state %kda_state: f32[S, 2, 48, 48]"

_FFN_SITE_LINE = f"  %p2, %y2, %b2 = attn_res_norm(%p1, %d, %b1, %m_res, %m_proj, %m_norm) {_FFN_SITE} : bf16[T, 96], bf16[T, 96], bf16[2, T, 96]\n"

_DENSE_BODY = """
  %h = linear(%y2, %w_gu) {beta: 4.0, epilogues: (situ), linear_beta: 25.0} : bf16[T, 160]
  %out = linear(%h, %w_down) {beta: 0.0, epilogues: (none), linear_beta: none} : bf16[T, 96]
"""
_DENSE = ("w_gu: bf16[320, 96]", "w_down: bf16[96, 160]")

_MOE = ("w_r: f32[6, 96]", "bias: f32[6]", "w_x: bf16[192, 96]", "w13: mxfp4[6, 128, 64]")
_MOE += ("w2: mxfp4[6, 64, 64]", "l_norm: f32[64]", "w_up: bf16[96, 64]", "w_sd: bf16[96, 64]")
_MOE_BODY = """
  %logits = linear(%y2, %w_r) {beta: 0.0, epilogues: (none), linear_beta: none} : f32[T, 6]
  %lat, %sh = linear(%y2, %w_x) {beta: 4.0, epilogues: (none, situ), linear_beta: 25.0} : bf16[T, 64], bf16[T, 64]
  %wt, %ex = route_topk(%logits, %bias) {k: 2, renormalize: true, scale: 1.0} : f32[T, 2], i32[T, 2]
  %off, %ord = dispatch(%ex) {num_experts: 6} : i32[7], i32[T, 2]
  %g1 = grouped_gemm(%lat, %w13, %off, %ord) {beta: 4.0, epilogue: situ, linear_beta: 25.0} : bf16[T, 2, 64]
  %g2 = grouped_gemm(%g1, %w2, %off, %ord) {beta: 0.0, epilogue: none, linear_beta: none} : bf16[T, 2, 64]
  %cn = combine_norm(%g2, %wt, %l_norm) {eps: 1e-05} : bf16[T, 64]
  %sd = linear(%sh, %w_sd) {beta: 0.0, epilogues: (none), linear_beta: none} : bf16[T, 96]
  %out = linear(%cn, %w_up, %sd) {beta: 0.0, epilogues: (none), linear_beta: none} : bf16[T, 96]
"""
_MLA = ("w_qkvz: bf16[176, 96]", "kv_norm: f32[32]", "kv_k: bf16[96, 32]", "kv_v: bf16[96, 32]")
_MLA += ("w_o: bf16[96, 48]",)
_MLA_BODY = f"""
  %p1, %y1, %b1 = attn_res_norm(%prefix, %pending, %bank, %a_res, %a_proj, %a_norm) {_SITE} : bf16[T, 96], bf16[T, 96], bf16[2, T, 96]
  %q, %kv, %z = linear(%y1, %w_qkvz) {{beta: 0.0, epilogues: (none, none, none), linear_beta: none}} : bf16[T, 80], bf16[T, 48], bf16[T, 48]
  %kv2 = mla_append(%kv, %kv_norm, %kv_cache, %seg_start, %seg_tokens, %context, %page_table) {{eps: 1e-05}} : bf16[P, 16, 48]
  %ql = mla_absorb_q(%q, %kv_k) {{heads: 2, nope_dim: 24, v_dim: 24}} : f32[T, 2, 48]
  %ol = mla_attend(%ql, %kv2, %seg_start, %seg_tokens, %context, %page_table) {{latent_dim: 32, scale: 0.1}} : f32[T, 2, 32]
  %a = mla_absorb_v(%ol, %kv_v, %z) {{heads: 2, nope_dim: 24, v_dim: 24}} : bf16[T, 48]
  %d = linear(%a, %w_o) {{beta: 0.0, epilogues: (none), linear_beta: none}} : bf16[T, 96]
"""
_RETURN = "  return prefix=%p2, pending=%out, bank=%b2"
_HEAD = """  weight %res: f32[96] from "res"
  weight %proj: f32[1, 96] from "proj"
  weight %norm: f32[96] from "norm"
  weight %lm_head: bf16[320, 96] from "lm_head"
  %p, %y, %b = attn_res_norm(%prefix, %pending, %bank, %res, %proj, %norm) {commit_row: -1, eps: 1e-05, res_eps: 1e-05, restart: 0, rows: 2} : bf16[T, 96], bf16[T, 96], bf16[2, T, 96]
"""
_SAMPLING = "io %temperature: f32[B], io %top_k: i32[B], io %top_p: f32[B], io %min_p: f32[B], io %seed: i64[B], io %position: i32[B]"

TEXT = f"""k3ir 1
level kernel
dim T in [1, 8192]
dim B in [1, 8]
dim S in [2, 64]
dim P in [2, 4096]
dim M in [1, 4096]

graph @prologue(io %ids: i32[T]) -> bf16[T, 96] {{
  weight %table: bf16[320, 96] from "table"
  %e = embed(%ids, %table) : bf16[T, 96]
  return pending=%e
}}

graph @kda_dense({_CARRY}, {_KDA_STATE}, {_SEGMENTS}) -> bf16[T, 96], bf16[T, 96], bf16[2, T, 96], bf16[S, 3, 288], f32[S, 2, 48, 48] {{
{_weights(*_NORMS, *_KDA, *_FNORMS, *_DENSE)}{_KDA_BODY}{_FFN_SITE_LINE}{_DENSE_BODY}{_RETURN}, conv_state=%cs, kda_state=%ks
}}

graph @kda_moe({_CARRY}, {_KDA_STATE}, {_SEGMENTS}) -> bf16[T, 96], bf16[T, 96], bf16[2, T, 96], bf16[S, 3, 288], f32[S, 2, 48, 48] {{
{_weights(*_NORMS, *_KDA, *_FNORMS, *_MOE)}{_KDA_BODY}{_FFN_SITE_LINE}{_MOE_BODY}{_RETURN}, conv_state=%cs, kda_state=%ks
}}

graph @mla_moe({_CARRY}, state %kv_cache: bf16[P, 16, 48], {_SEGMENTS.replace("io %slots: i32[B], ", "")}, io %page_table: i32[B, M]) -> bf16[T, 96], bf16[T, 96], bf16[2, T, 96], bf16[P, 16, 48] {{
{_weights(*_NORMS, *_MLA, *_FNORMS, *_MOE)}{_MLA_BODY}{_FFN_SITE_LINE}{_MOE_BODY}{_RETURN}, kv_cache=%kv2
}}

graph @head({_CARRY}, io %sample_rows: i32[B], {_SAMPLING}) -> i32[B], f32[B, 320] {{
{_HEAD}  %r = gather_rows(%y, %sample_rows) : bf16[B, 96]
  %l = linear(%r, %lm_head) {{beta: 0.0, epilogues: (none), linear_beta: none}} : f32[B, 320]
  %t = sample(%l, %temperature, %top_k, %top_p, %min_p, %seed, %position) : i32[B]
  return tokens=%t, logits=%l
}}

graph @score_head({_CARRY}, io %targets: i32[T]) -> f32[T] {{
{_HEAD}  %l = linear(%y, %lm_head) {{beta: 0.0, epilogues: (none), linear_beta: none}} : f32[T, 320]
  %s = token_logprob(%l, %targets) : f32[T]
  return logprobs=%s
}}

schedule {{
  prologue -1 {{}}
  kda_dense 0 {{attn_restart: 1, attn_rows: 0, commit_row: 0, ffn_restart: 1, ffn_rows: 1}}
  kda_moe 1 {{attn_restart: 0, attn_rows: 1, commit_row: -1, ffn_restart: 0, ffn_rows: 1}}
  mla_moe 2 {{attn_restart: 0, attn_rows: 1, commit_row: 1, ffn_restart: 1, ffn_rows: 2}}
  kda_moe 3 {{attn_restart: 0, attn_rows: 2, commit_row: -1, ffn_restart: 0, ffn_rows: 2}}
  mla_moe 4 {{attn_restart: 0, attn_rows: 2, commit_row: -1, ffn_restart: 0, ffn_rows: 2}}
  head -1 {{}}
}}
"""


def module() -> Module:
    """Return the module."""
    return parse(TEXT)


@dataclass(frozen=True)
class FakeTemplate:
    """A template for any node of an op."""

    op: str
    name: str = ""
    reference: str = ""
    layout: str = ""
    workspace_per_row: int = 0
    refuses: str = ""
    min_rows: int = 0

    def accepts(self, node, target):
        rows = node.results[0].type.sizes[0]
        if self.refuses:
            return Refusal(self.refuses, rows)
        return Refusal("too few rows", rows) if rows < self.min_rows else None

    def layouts(self, node, target):
        return {1: self.layout} if self.layout else {}

    def configs(self, node, target):
        return ({},)

    def config(self, node, target):
        return {}

    def tuning_key(self, node):
        return node.op

    def stages(self, node, target):
        return (Stage("", {"width": node.results[0].type.sizes[-1]}),)

    def scalars(self, node):
        layer = [(k, v) for k, v in sorted(node.attrs.items()) if isinstance(v, LayerAttr)]
        return (("rows", node.results[0].type.sizes[0]), *layer)

    def workspace_bytes(self, node, target):
        return self.workspace_per_row * node.results[0].type.sizes[0]

    def cost(self, node, target):
        return Cost(
            sum(v.type.nbytes for v in node.operands), sum(v.type.nbytes for v in node.results), 1
        )


OPS = ("embed", "attn_res_norm", "kda", "mla_append", "mla_absorb_q", "mla_attend", "mla_absorb_v")
OPS += ("route_topk", "dispatch", "combine_norm", "gather_rows", "sample", "token_logprob")


def catalogue(*first: FakeTemplate) -> Catalogue:
    """Return templates for every op of the module; `first` are preferred."""
    plain = [FakeTemplate(op, f"{op}_any") for op in OPS]
    gemm = FakeTemplate("linear", "gemm", layout="panel.v8", min_rows=9)
    gemv = FakeTemplate("linear", "gemv", layout="panel.v8")
    grouped = FakeTemplate("grouped_gemm", "grouped", layout="mx.v8", workspace_per_row=260)
    return Catalogue((*first, *plain, gemm, gemv, grouped))


def bucket(name: str) -> Bucket:
    """Return `decode.bN`, `prefill.tN` or `score.tN`."""
    phase, _, size = name.partition(".")
    count = int(size[1:])
    rows = {"T": count, "B": count if phase == "decode" else 8}
    return Bucket(name, phase, {**rows, **STATE})


def packed_bytes(kind) -> int:
    """Packed weights fill whole tiles of 256 bytes."""
    return -(-kind.nbytes // 256) * 256 if str(kind.layout) != "row_major" else kind.nbytes


def kernel_symbol(template, stage, target) -> str:
    return f"{template.name}-{target.name}-{sorted(stage.constants.items())}"


def plans(*names: str, source: Module | None = None) -> list[Plan]:
    """Return the plans of some buckets."""
    whole = source or module()
    selections = [select_kernels.run(whole, bucket(n), catalogue(), TARGET) for n in names]
    weights = weight_table(selections, packed_bytes)
    return [build_plan.run(schedule.run(s), weights, kernel_symbol) for s in selections]
