"""Attention with its projections, as PyTorch's fast path for ``torch.nn.MultiheadAttention`` spells it."""

from __future__ import annotations

from math import sqrt
from typing import Any

from npu_compiler.dtypes import BOOL
from npu_compiler.ops.attention import scaled_dot_product_attention
from npu_compiler.ops.linear import linear, product
from npu_compiler.ops.normalization import softmax
from npu_compiler.ops.reduction import mean
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, where

_OF_ALL, _OF_KEYS, _OF_EACH = range(3)  # what a mask is of: pairs of positions, each text's keys, each head's pairs


@op("aten._native_multi_head_attention.default", work=Work.ANCHOR)
def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of [B, T, D], its projections before and behind it, and its weights where they are needed.

    The mask closes where it is true: [T, T] for all, [B, T] for the keys of each text, or [B, H, T, T], by `mask_type`.
    A row that is closed everywhere gives NaN, as PyTorch's. Weights are [B, T, T], or [B, H, T, T] where no average of
    the heads is asked for.
    """
    given = [query, key, value]
    if any(len(each.shape) != 3 or each.shape[2] != embed_dim for each in given) or embed_dim % num_head:
        shapes = ", ".join(str(list(each.shape)) for each in given)
        raise OpRefusal(
            f"given {shapes} for embed_dim={embed_dim} and num_head={num_head}, expected [B, T, {embed_dim}]"
        )
    size = embed_dim // num_head
    q, k, v = (
        linear(
            each, qkv_weight.slice(0, part * embed_dim, embed_dim), qkv_bias.slice(0, part * embed_dim, embed_dim)
        ).reshape((*each.shape[:2], num_head, size)).swap(1, 2)
        for part, each in enumerate(given)
    )  # fmt: skip
    weights = None
    if mask is None and not need_weights:
        heads = scaled_dot_product_attention(q, k, v)
    else:
        scores = product(q * (1 / sqrt(size)), k.swap(-2, -1))
        if mask is not None:
            scores = where(_closed(mask, mask_type, scores.shape), float("-inf"), scores)
        weights = softmax(scores, -1).cast(q.dtype)
        heads = product(weights, v)
    result = linear(heads.swap(1, 2).reshape(query.shape), proj_weight, proj_bias)
    if weights is None or not need_weights:
        return result
    return result, mean(weights, [1]) if average_attn_weights else weights


def _closed(mask: Tensor, kind: Any, scores: tuple[int, ...]) -> Tensor:
    """The mask as it broadcasts to the scores [B, H, T, L]."""
    batch, _, rows, length = scores
    kinds = {_OF_ALL: (rows, length), _OF_KEYS: (batch, length), _OF_EACH: scores}
    if mask.dtype != BOOL or kind not in kinds or mask.shape != kinds[kind]:
        raise OpRefusal(
            f"given a mask {list(mask.shape)} of {mask.dtype} and mask_type={kind}, expected booleans of "
            f"{[list(shape) for shape in kinds.values()]} for 0, 1 and 2"
        )
    return mask.reshape((batch, 1, 1, length)) if kind == _OF_KEYS else mask
