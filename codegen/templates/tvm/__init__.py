"""Templates for CPUs, in order of preference within an op."""

from __future__ import annotations

from k3c.codegen.templates.tvm import (
    attn_res_norm,
    combine,
    dispatch,
    gather,
    mla_absorb,
    mla_append,
    pointwise,
    rms_norm,
    route_topk,
)
from k3c.codegen.templates.tvm.grouped_gemm import GROUPED_DECODE, GROUPED_PREFILL
from k3c.codegen.templates.tvm.linear import LINEAR_DECODE
from k3c.codegen.templates.tvm.linear_gemm import LINEAR_PREFILL
from k3c.targets.catalogue import Template

CPU_TEMPLATES: tuple[Template, ...] = (
    LINEAR_DECODE,
    LINEAR_PREFILL,
    GROUPED_DECODE,
    GROUPED_PREFILL,
    *gather.TEMPLATES,
    *route_topk.TEMPLATES,
    *dispatch.TEMPLATES,
    *combine.TEMPLATES,
    *pointwise.TEMPLATES,
    *attn_res_norm.TEMPLATES,
    *rms_norm.TEMPLATES,
    *mla_append.TEMPLATES,
    *mla_absorb.TEMPLATES,
)
