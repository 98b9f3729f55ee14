"""Templates for GPUs, in order of preference within an op."""

from __future__ import annotations

from k3c.codegen.templates.triton import (
    attn_res_norm,
    combine,
    embed,
    kda_decode,
    kda_verify,
    linear_decode,
    linear_gemm,
    pointwise,
    rms_norm,
    route,
    sample,
    token_logprob,
)
from k3c.targets.catalogue import Template

GPU_TEMPLATES: tuple[Template, ...] = (
    *linear_decode.TEMPLATES,
    *linear_gemm.TEMPLATES,
    *embed.TEMPLATES,
    *route.TEMPLATES,
    *combine.TEMPLATES,
    *pointwise.TEMPLATES,
    *sample.TEMPLATES,
    *token_logprob.TEMPLATES,
    *kda_decode.TEMPLATES,
    *kda_verify.TEMPLATES,
    *attn_res_norm.TEMPLATES,
    *rms_norm.TEMPLATES,
)
