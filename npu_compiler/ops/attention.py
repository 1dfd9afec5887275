"""Attention as one op; the compiler's rewrites bring its decomposed forms to this one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod, sqrt
from typing import Any, NamedTuple

from npu_compiler.dtypes import BOOL
from npu_compiler.ops.linear import product
from npu_compiler.ops.normalization import safe_softmax
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.shapes import broadcast_shapes
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, where
from npu_compiler.tensor.trace import MAX_HEAD_SIZE


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


_attends = partial(
    op,
    work=Work.ANCHOR,
    rows=_attended_rows,
    term=Term("attention", ("query", "key", "value", "attn_mask")),
    flops=flops,
)


@_attends("aten.scaled_dot_product_attention.default")
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

    Query [..., H, S, D], key [..., G, L, D], value [..., G, L, E]; G = H or 1, any divisor of H with `enable_gqa`. One
    head may do without its dimension. The mask broadcasts to [..., H, S, L], booleans (True is open) or floats to add.
    A row that is closed everywhere gives zeros, as PyTorch's.
    """
    if dropout_p:
        raise OpRefusal(f"given dropout_p={dropout_p}, expected 0; call model.eval() before extraction")
    if is_causal and attn_mask is not None:
        raise OpRefusal("given both is_causal and a mask, expected one of them")
    return _attention(query, key, value, attn_mask, _Form(is_causal, scale, enable_gqa))


@_attends("rewritten.capped_attention.default")
def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: Any = None,
    enable_gqa: bool = False, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention whose scores x become ``tanh(x / cap) * cap`` ahead of the mask; models spell it out."""
    if not cap > 0:
        raise OpRefusal(f"given cap={cap}, expected a positive number")
    return _attention(query, key, value, attn_mask, _Form(False, scale, enable_gqa, float(cap)))


@_attends("rewritten.attention_with_sinks.default")
def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, attn_mask: Tensor | None = None, scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention whose softmax is over the scores and one more, the head's of `sinks` [H], which brings no value."""
    if len(query.shape) != 4 or sinks.shape != (query.shape[1],) or not sinks.dtype.is_float:
        given = f"sinks {list(sinks.shape)} of {sinks.dtype} for queries {list(query.shape)}"
        raise OpRefusal(f"given {given}, expected queries of four dimensions and a number for each head")
    return _attention(query, key, value, attn_mask, _Form(False, scale, enable_gqa), sinks)


class _Form(NamedTuple):
    """How attention is asked for: as `scaled_dot_product_attention` says, with a cap of its scores where it is not 0.

    The masks of the first `period` elements of the batch, where given, are those of all, again and again.
    """

    is_causal: bool
    scale: Any
    enable_gqa: bool
    cap: float = 0.0
    period: int | None = None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, form: _Form, sinks: Tensor | None = None
) -> Tensor:
    rank = len(query.shape)
    if rank < 2 or not rank == len(key.shape) == len(value.shape):
        raise OpRefusal(f"given {rank}, {len(key.shape)} and {len(value.shape)} dimensions, expected two or more each")
    if rank != 4:
        return _of_four_dimensions(query, key, value, attn_mask, form)
    _check_shapes(query, key, value, form.enable_gqa)
    batch, heads, rows, size = query.shape
    length = key.shape[2]
    operands = [query, key, value]
    if attn_mask is not None:
        scores = (batch if form.period is None else form.period, heads, rows, length)
        if broadcast_shapes(attn_mask.shape, scores) != scores:
            raise OpRefusal(f"the mask {list(attn_mask.shape)} does not broadcast to {list(scores)}")
        if attn_mask.dtype != BOOL and not attn_mask.dtype.is_float:
            raise OpRefusal(f"given a mask of {attn_mask.dtype}, expected booleans or floats")
        operands.append(attn_mask.expand(scores))
    factor = float(form.scale) if form.scale is not None else 1 / sqrt(max(1, size))
    if not (length and min(size, value.shape[-1]) >= 1 and max(size, value.shape[-1]) <= MAX_HEAD_SIZE):
        if sinks is not None:
            raise OpRefusal(f"given heads of {size} over {length} positions, expected 1 to {MAX_HEAD_SIZE} over some")
        mask = _repeated(operands[3], batch) if len(operands) > 3 else None
        return _written_out(query, key, value, mask, factor, form.is_causal, form.cap)
    operands += [] if sinks is None else [sinks]
    attrs: dict[str, Any] = {"scale": factor, "causal": form.is_causal, "cap": form.cap, "sinks": sinks is not None}
    shape = (batch, heads, rows, value.shape[-1])
    return query.trace.anchor("attention", tuple(operands), shape, query.dtype, **attrs)


def _of_four_dimensions(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: _Form) -> Tensor:
    """Attention of matrices, of heads without a batch, or of batches of several dimensions.

    A mask that is the same along the outer ones of these is not repeated in memory.
    """
    lead, heads = query.shape[:-3], query.shape[-3:-2] or (1,)
    if not lead == key.shape[:-3] == value.shape[:-3]:
        raise OpRefusal(f"given batches of {list(lead)}, {list(key.shape[:-3])} and {list(value.shape[:-3])}")
    q, k, v = (t.reshape((prod(lead), *(t.shape[-3:-2] or (1,)), *t.shape[-2:])) for t in (query, key, value))
    period = None
    if mask is not None and len(mask.shape) > 3:
        missing = len(query.shape) - len(mask.shape)
        outer = next((dim for dim in range(len(lead)) if dim >= missing and mask.shape[dim - missing] != 1), 0)
        inner = lead
        if prod(lead[outer:]) < prod(lead):
            inner, mask = lead[outer:], mask.reshape(mask.shape[outer - missing :])
            period = prod(inner)
        whole = mask.expand((*inner, *heads, query.shape[-2], key.shape[-2]))
        mask = whole.reshape((prod(inner), *whole.shape[-3:]))
    result = _attention(q, k, v, mask, form._replace(period=period))
    return result.reshape((*query.shape[:-1], value.shape[-1]))


def _repeated(mask: Tensor, batch: int) -> Tensor:
    """The mask of each element of a batch, given those of the first ones, which the others have again and again."""
    if mask.shape[0] == batch:
        return mask
    return mask.expand((batch // mask.shape[0], *mask.shape)).reshape((batch, *mask.shape[1:]))


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, cap: float
) -> Tensor:
    """The same by products and a softmax, for sizes that the kernels for attention do not take."""
    (batch, heads, rows, size), (groups, length) = q.shape, k.shape[1:3]
    shared = heads // max(1, groups)
    many = q.reshape((batch, groups, shared, rows, size))
    keys, values = (t.reshape((batch, groups, 1, *t.shape[2:])) for t in (k, v))
    scores = product(many, keys.swap(-2, -1)) * scale
    if cap:
        scores = apply("tanh", scores / cap) * cap
    if causal:
        column, row = arange(q.trace, length), arange(q.trace, rows).reshape((rows, 1))
        scores = where(column > row, float("-inf"), scores)
    if mask is not None:
        given = mask.reshape((batch, groups, shared, rows, length))
        scores = where(given, scores, float("-inf")) if mask.dtype == BOOL else scores + given
    weights = safe_softmax(scores, -1)
    return product(weights.cast(v.dtype), values).reshape((batch, heads, rows, v.shape[-1]))


@op("aten._scaled_dot_product_flash_attention_for_cpu.default", work=Work.ANCHOR, flops=flops)
def flash_attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Tensor | None = None, scale: Any = None,
) -> Tensor:  # fmt: skip
    """Attention; of its results only the first one, without the logarithms of its sums."""
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


@op("aten._scaled_dot_product_flash_attention.default", work=Work.ANCHOR, flops=flops)
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, scale: Any = None,
) -> Tensor:  # fmt: skip
    """Attention; of its results only the first one, without what the backward pass reads."""
    return scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, scale)


@op(
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    work=Work.ANCHOR,
    flops=flops,
)
def attention_with_bias(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, compute_log_sumexp: bool = False,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, scale: Any = None,
) -> Tensor:  # fmt: skip
    """Attention; of its results only the first one, without what the backward pass reads."""
    return scaled_dot_product_attention(query, key, value, attn_bias, dropout_p, is_causal, scale)


@op("aten._scaled_dot_product_attention_math.default", work=Work.ANCHOR, flops=flops)
def attention_by_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Tensor | None = None, scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention; of its results only the first one, without the weights."""
    if dropout_mask is not None:
        raise OpRefusal("given a mask of dropout, expected none; call model.eval() before extraction")
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, groups = query.shape[1], key.shape[1]
    shared = heads == groups or groups == 1 or (enable_gqa and groups and heads % groups == 0)
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
