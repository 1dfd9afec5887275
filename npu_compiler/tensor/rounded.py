"""Numbers rounded to codes of a few bits, and such codes read again as numbers, in as few operations as there are.

The number is limited before it is rounded. So it is small, and a target may round it by adding a large number and
taking that away again; nothing happens between a code and the number that it stands for but the removal of the zero
point.
"""

from __future__ import annotations

from npu_compiler.dtypes import FLOAT32, INT32, DType
from npu_compiler.tensor.expr import Call, Const, Expr

__all__ = ["by_constant", "rounded_code", "simplified", "under_casts"]


def rounded_code(number: Expr, zero: int, limits: tuple[int, int], dtype: DType) -> Expr | None:
    """``clamp(rint(number) + zero, *limits)`` as an integer; None where no type of two bytes or less holds the limits.

    Args:
        number: A float32; of NaN the code is any.
        zero: What is added.
        limits: The least and the greatest code.
        dtype: Data type of the code.
    """
    low, high = limits
    bits = 8 * dtype.size
    least = 0 if dtype.name.startswith("u") else -(1 << (bits - 1))
    if dtype.size > 2 or not least <= low <= high < least + (1 << bits) or abs(zero) >= 1 << 16:
        return None
    for fn, limit in (("max", low - zero), ("min", high - zero)):
        number = Call(fn, (number, Const(float(limit), FLOAT32)), FLOAT32)
    return Call("code", (number, Const(zero, INT32)), dtype)


def simplified(node: Expr) -> Expr | None:
    """Another form of an expression whose operands are simplified already; None where there is none."""
    if not isinstance(node, Call):
        return None
    first = node.args[0]
    if node.fn == "cast" and node.dtype == FLOAT32 and isinstance(first, Call) and first.fn == "code":
        number, zero = first.args
        assert isinstance(zero, Const)
        return Call("add", (Call("nearest", (number,), FLOAT32), Const(float(zero.value), FLOAT32)), FLOAT32)
    if (taken := by_constant(node, "sub")) is not None and (added := by_constant(first, "add")) is not None:
        whole = added[0]
        if added[1] == taken[1] and isinstance(whole, Call) and whole.fn == "nearest":
            return whole
    if node.fn == "max" and node.args[1] is Const(0.0, FLOAT32):
        return _without_relu(node)
    return None


def _without_relu(limited: Call) -> Expr | None:
    """``max(max(x, 0) * scale, 0)`` without the first of them."""
    scaled, zero = limited.args
    if not isinstance(scaled, Call) or scaled.fn != "mul":
        return None
    number, scale = scaled.args
    inner = under_casts(number)
    is_scale = isinstance(scale, Const) and scale.value > 0
    if not is_scale or not isinstance(inner, Call) or inner.fn != "where":
        return None
    condition, otherwise, kept = inner.args
    if not isinstance(condition, Call) or condition.fn != "lt" or condition.args[0] is not kept:
        return None
    if not all(isinstance(each, Const) and each.value == 0 for each in (otherwise, condition.args[1])):
        return None
    return Call("max", (Call("mul", (kept, scale), FLOAT32), zero), FLOAT32)


def by_constant(node: Expr, fn: str) -> tuple[Expr, float] | None:
    """The first operand of a call of `fn`, and the second one, where that is a constant."""
    if not isinstance(node, Call) or node.fn != fn or not isinstance(node.args[1], Const):
        return None
    return node.args[0], node.args[1].value


def under_casts(number: Expr) -> Expr:
    """What stands under casts between types of floating point, which change nothing ahead of a store."""
    while isinstance(number, Call) and number.fn == "cast" and number.args[0].dtype.is_float and number.dtype.is_float:
        number = number.args[0]
    return number
