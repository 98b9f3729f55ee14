"""The ops of the model and of the kernel level: plain torch bodies, shape rules, `k3c::` torch ops.

One file a family. Every body is importable from here; `REFERENCE[op](*operands, **attrs)` returns
its results as a tuple.
"""

from k3c.export.ops.activation import sigmoid_mul, situ
from k3c.export.ops.attention_residual import attn_res, bank_commit, residual_join
from k3c.export.ops.fused import (
    attn_res_norm,
    combine_norm,
    grouped_gemm,
    kda,
    kda_fb,
    linear_ranges,
    mla_absorb_v,
    norm_linear,
)
from k3c.export.ops.kda import (
    kda_chunkwise,
    kda_gate,
    kda_recurrence,
    kda_recurrent,
    short_conv,
)
from k3c.export.ops.linear import embed, gather_rows, linear
from k3c.export.ops.mla import (
    mla_absorb_q,
    mla_append,
    mla_attend,
    mla_attention,
    mla_attention_expanded,
)
from k3c.export.ops.moe import (
    combine,
    grouped_linear,
    route_topk,
    routing_weights,
)
from k3c.export.ops.norm import gated_rms_norm, l2_norm, rms_norm
from k3c.export.ops.registry import REFERENCE, internal_dtype, library
from k3c.export.ops.sampling import counter_uniform, sample, token_logprob
from k3c.export.ops.sharded import (
    advance,
    all_gather,
    all_reduce,
    combine_tokens,
    dispatch,
    dispatch_tokens,
    join_columns,
    local_embed,
    map_experts,
    norm_columns,
    route_dispatch,
)
from k3c.export.ops.speculation import kda_fold, kda_verify

__all__ = [
    "REFERENCE",
    "advance",
    "all_gather",
    "all_reduce",
    "attn_res",
    "attn_res_norm",
    "bank_commit",
    "combine",
    "combine_norm",
    "combine_tokens",
    "counter_uniform",
    "dispatch",
    "dispatch_tokens",
    "embed",
    "gated_rms_norm",
    "gather_rows",
    "grouped_gemm",
    "grouped_linear",
    "internal_dtype",
    "join_columns",
    "kda",
    "kda_chunkwise",
    "kda_fb",
    "kda_fold",
    "kda_gate",
    "kda_recurrence",
    "kda_recurrent",
    "kda_verify",
    "l2_norm",
    "library",
    "linear",
    "linear_ranges",
    "local_embed",
    "map_experts",
    "mla_absorb_q",
    "mla_absorb_v",
    "mla_append",
    "mla_attend",
    "mla_attention",
    "mla_attention_expanded",
    "norm_columns",
    "norm_linear",
    "residual_join",
    "rms_norm",
    "route_dispatch",
    "route_topk",
    "routing_weights",
    "sample",
    "short_conv",
    "sigmoid_mul",
    "situ",
    "token_logprob",
]
