"""Attention as one op; the compiler's rewrites bring its decomposed forms to this one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any

from npu_compiler.dtypes import BOOL
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.shapes import broadcast_shapes
from npu_compiler.tensor.symbolic import OpRefusal, Tensor


def _attended_rows(call: RowCall) -> Passage | None:
    """Rows of the queries and of the mask; or some of the batch, of all that has it."""
    mask = call.broadcast("attn_mask") if "attn_mask" in call.node.inputs else {}
    if call.dim == 0 and call.rank == 4:
        return Passage({"query": 0, "key": 0, "value": 0} | mask)
    if call.dim != call.rank - 2:
        return None
    if call.node.attrs.get("is_causal"):
        last = call.shape("key")[-2] - 1
        sees_all = call.rows.known is not None and min(call.rows.known) >= last
        return Passage({"query": call.dim}, {"is_causal": False}) if sees_all else None
    return Passage({"query": call.dim} | mask)


def flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """Of both products, by the shapes of queries, keys and values."""
    return 2 * (prod(operands[0]) + made) * operands[1][-2] if len(operands) > 2 else None


@op(
    "aten.scaled_dot_product_attention.default",
    work=Work.ANCHOR,
    rows=_attended_rows,
    term=Term("attention", ("query", "key", "value", "attn_mask")),
    flops=flops,
)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query @ key.T * scale + mask) @ value`` by head; several query heads may share one of key and value.

    Query [..., H, S, D], key [..., G, L, D], value [..., G, L, E]; G = H unless `enable_gqa`. The mask broadcasts to
    [..., H, S, L], booleans (True is open) or floats to add. A row that is closed everywhere gives zeros, as PyTorch's.
    """
    if dropout_p:
        raise OpRefusal(f"given dropout_p={dropout_p}, expected 0; call model.eval() before extraction")
    if is_causal and attn_mask is not None:
        raise OpRefusal("given both is_causal and a mask, expected one of them")
    rank = len(query.shape)
    if not (rank == len(key.shape) == len(value.shape) and rank in (3, 4)):
        raise OpRefusal(f"given {rank}, {len(key.shape)} and {len(value.shape)} dimensions, expected 3 or 4 each")
    if rank == 3:
        q, k, v = (t.reshape((1, *t.shape)) for t in (query, key, value))
        result = scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa)
        return result.reshape(result.shape[1:])
    _check_shapes(query, key, value, enable_gqa)
    batch, heads, rows, size = query.shape
    length = key.shape[2]
    operands = [query, key, value]
    if attn_mask is not None:
        if broadcast_shapes(attn_mask.shape, (batch, heads, rows, length)) != (batch, heads, rows, length):
            raise OpRefusal(f"the mask {list(attn_mask.shape)} does not broadcast to {[batch, heads, rows, length]}")
        if attn_mask.dtype != BOOL and not attn_mask.dtype.is_float:
            raise OpRefusal(f"given a mask of {attn_mask.dtype}, expected booleans or floats")
        operands.append(attn_mask.expand((batch, heads, rows, length)))
    factor = float(scale) if scale is not None else 1 / sqrt(size)
    shape = (batch, heads, rows, value.shape[-1])
    return query.trace.anchor("attention", tuple(operands), shape, query.dtype, scale=factor, causal=is_causal)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, groups = query.shape[1], key.shape[1]
    shared = heads == groups or (enable_gqa and groups and heads % groups == 0)
    fits = (
        query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[1:3] == value.shape[1:3]
        and shared
    )
    if not fits:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise OpRefusal(f"query, key and value of shapes {shapes} do not fit together")
    if not all(t.dtype.is_float for t in (query, key, value)):
        raise OpRefusal("query, key and value must be floating point")
