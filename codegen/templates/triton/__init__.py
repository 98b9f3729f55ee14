"""Templates for GPUs, in order of preference within an op."""

from __future__ import annotations

from k3c.codegen.templates.triton import (
    attn_res_norm,
    columns,
    combine,
    embed,
    grouped_gemm,
    kda_decode,
    kda_prefill,
    kda_verify,
    linear_decode,
    linear_gemm,
    mla_absorb,
    mla_append,
    mla_attend,
    pointwise,
    rms_norm,
    route,
    route_map,
    sample,
    token_logprob,
)
from k3c.targets.catalogue import Template

GPU_TEMPLATES: tuple[Template, ...] = (
    *linear_decode.TEMPLATES,
    *linear_gemm.TEMPLATES,
    *embed.TEMPLATES,
    *route.TEMPLATES,
    *route_map.TEMPLATES,
    *grouped_gemm.TEMPLATES,
    *combine.TEMPLATES,
    *pointwise.TEMPLATES,
    *sample.TEMPLATES,
    *token_logprob.TEMPLATES,
    *kda_decode.TEMPLATES,
    *kda_verify.TEMPLATES,
    *kda_prefill.TEMPLATES,
    *mla_append.TEMPLATES,
    *mla_absorb.TEMPLATES,
    *mla_attend.TEMPLATES,
    *attn_res_norm.TEMPLATES,
    *rms_norm.TEMPLATES,
    *columns.TEMPLATES,
)
