"""Templates for CPUs, in order of preference within an op."""

from __future__ import annotations

from k3c.codegen.templates.tvm import (
    attn_res_norm,
    combine,
    dispatch,
    gather,
    grouped_gemm,
    kda_decode,
    kda_prefill,
    linear,
    linear_gemm,
    mla_absorb,
    mla_append,
    mla_attend,
    pointwise,
    rms_norm,
    route_topk,
    sample,
    token_logprob,
)
from k3c.targets.catalogue import Template

CPU_TEMPLATES: tuple[Template, ...] = (
    linear.LINEAR_DECODE,
    linear_gemm.LINEAR_PREFILL,
    grouped_gemm.GROUPED_DECODE,
    grouped_gemm.GROUPED_PREFILL,
    *kda_decode.TEMPLATES,
    *kda_prefill.TEMPLATES,
    *mla_append.TEMPLATES,
    *mla_absorb.TEMPLATES,
    *mla_attend.TEMPLATES,
    *attn_res_norm.TEMPLATES,
    *rms_norm.TEMPLATES,
    *route_topk.TEMPLATES,
    *dispatch.TEMPLATES,
    *combine.TEMPLATES,
    *gather.TEMPLATES,
    *pointwise.TEMPLATES,
    *sample.TEMPLATES,
    *token_logprob.TEMPLATES,
)
