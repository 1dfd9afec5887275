"""Epilogues in the fewest instructions: ReLU as one, powers of e as two, and sums rounded to codes of a byte.

Scales of what is rounded are multiplied beforehand, and limits come for free.
What is rounded, ``clamp(y, low, high)`` of whole limits that are at most 255 apart, is computed as ``(y - low) / 256``,
which the addition that ends it limits to [0, 1]; a multiplication and addition brings it to where floats are whole
numbers, and the upper limit alone is left. Constants that a sum's parts are multiplied by take the scale into
themselves. Sums are rounded as often as before, or less often, to 2^-17 of a code.
"""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.lowering.grouping import Group
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Const, Expr, substitute, walk
from npu_compiler.tensor.rounded import by_constant, under_casts

__all__ = ["in_few_instructions", "operations_on_codes", "shortened"]

_WHOLE = 1.5 * (1 << 23)  # from which on floats have no fractions, upwards and downwards
_RANGE = 256
_LARGEST_LIMIT = 1 << 16


def in_few_instructions(group: Group) -> Group:
    """A group around a problem whose expression is `shortened`; powers of e are too, where 16 bits of it are stored."""
    expr, dtype = shortened(group.expr), group.output.dtype
    return changed(group, expr=substitute(expr, _short_exp) if dtype.is_float and dtype.size == 2 else expr)


def shortened(expr: Expr) -> Expr:
    """An expression of the results of a product, in fewer instructions; see above."""
    return substitute(expr, _shortened)


def operations_on_codes(group: Group) -> int:
    """Operations of an epilogue on each result, conversions left out, where it rounds to codes; 0 where it does not."""
    calls = [node for node in walk(group.expr) if isinstance(node, Call)]
    if not any(call.fn in ("code", "nearest") for call in calls):
        return 0
    return sum(isinstance(node, Call) and node.fn not in ("cast", "bits") for node in walk(shortened(group.expr)))


def _short_exp(node: Expr) -> Expr | None:
    return Call("short_exp", node.args, node.dtype) if isinstance(node, Call) and node.fn == "exp" else None


def _shortened(node: Expr) -> Expr | None:
    if isinstance(node, Call) and node.fn == "where":
        return _greater(node)
    if not isinstance(node, Call) or node.fn not in ("code", "nearest"):
        return None
    limited, zero = _limited(node.args[0]), 0
    if node.fn == "code" and isinstance(node.args[1], Const):
        zero = int(node.args[1].value)
    if limited is None:
        return None
    number, low, high = limited
    even = zero if zero % 2 == 0 else 0  # halves go to even codes less their zero point
    unit = Call("saturate", (_scaled(number, 1 / _RANGE, -low / _RANGE),), FLOAT32)
    whole = _sum(_product(unit, _const(_RANGE)), _const(_WHOLE + low + even))
    whole = Call("min", (whole, _const(_WHOLE + high + even)), FLOAT32)
    if node.fn == "nearest":
        return Call("sub", (whole, _const(_WHOLE)), FLOAT32)
    code = whole if even == zero else _sum(whole, _const(zero))
    return Call("cast", (Call("bits", (code,), INT32),), node.dtype)


def _greater(node: Call) -> Expr | None:
    """``x < 0 ? 0 : x`` as the greater of both, which is one instruction; NaN stays."""
    condition, zero, number = node.args
    is_negative = isinstance(condition, Call) and condition.fn == "lt" and condition.args == (number, zero)
    if not is_negative or CUDA.register(node.dtype) != "float" or not isinstance(zero, Const) or zero.value != 0:
        return None
    return Call("max", (number, zero), node.dtype)


def _limited(number: Expr) -> tuple[Expr, int, int] | None:
    """What ``min(max(y, low), high)`` limits, and the limits, where a byte holds all codes between them."""
    limits = []
    for fn in ("min", "max"):
        found = by_constant(number, fn)
        if found is None or found[1] != int(found[1]) or abs(found[1]) > _LARGEST_LIMIT:
            return None
        number, limit = found
        limits.append(int(limit))
    high, low = limits
    return (number, low, high) if 0 <= high - low < _RANGE else None


def _scaled(number: Expr, scale: float, added: float) -> Expr:
    """``number * scale + added``, with as few operations on what differs between rows as there can be."""
    number = under_casts(number)
    product = by_constant(number, "mul")
    if product is not None:
        return _scaled(product[0], scale * product[1], added)
    if isinstance(number, Call) and number.fn == "add" and any(map(_has_scale, number.args)):
        left, right = number.args
        return _sum(_scaled(left, scale, 0.0), _scaled(right, scale, added))
    return _sum(_product(number, _const(scale)), _const(added))


def _has_scale(number: Expr) -> bool:
    """Whether it is a product by a constant."""
    return by_constant(under_casts(number), "mul") is not None


def _sum(left: Expr, right: Expr) -> Expr:
    return left if isinstance(right, Const) and right.value == 0 else Call("add", (left, right), FLOAT32)


def _product(left: Expr, right: Expr) -> Expr:
    return Call("mul", (left, right), FLOAT32)


def _const(value: float) -> Const:
    return Const(float(value), FLOAT32)
