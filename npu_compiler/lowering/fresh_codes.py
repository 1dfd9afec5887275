"""Keys and values that are rounded to codes on their way into a cache: attention may do that for the cache it reads."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.lowering.cache_codes import Coded
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.paging import unnumbered
from npu_compiler.lowering.problems.forms import FreshCodes
from npu_compiler.lowering.schedule import Dataflow
from npu_compiler.tensor.coded import LARGEST, LEAST_SCALE, encoded_number
from npu_compiler.tensor.expr import Call, Const, Expr, Load, Reduce, leaves, reindex, substitute
from npu_compiler.tensor.rounded import under_casts
from npu_compiler.tensor.view import Step

__all__ = ["with_fresh_codes"]
_ONE = Const(1.0, FLOAT32)


def with_fresh_codes(operand: Coded, flow: Dataflow) -> tuple[Coded, list[int]] | None:
    """Codes with the rows that are new among them, where nothing but the operand and the caches takes these.

    Args:
        operand: Codes that a scatter leaves, and scales that another one leaves.
        flow: What computes and what reads each tensor; the two scatters may be among its outputs.

    Returns:
        The operand, and the tensors whose groups its launch takes the place of; None where it is something else.
    """
    stored = [_alone(flow, index, 1) for index in (operand.tensor.index, operand.scale.tensor.index)]
    codes, scales = stored
    if codes is None or scales is None or codes.index is None or scales.index is None:
        return None
    product, scale = _rounded(codes.expr, operand), under_casts(scales.expr)
    if not isinstance(product, Call) or product.fn != "mul" or not isinstance(scale, Load):
        return None
    numbers, inverse = product.args
    rounding = _alone(flow, scale.ref.tensor, 2)
    if rounding is None or scale.ref.tensor in flow.outputs or not _inverts(inverse, rounding):
        return None
    if not scale.ref.view.same_elements(rounding.output.view) or numbers != _rows_of(rounding.expr, operand):
        return None
    if unnumbered(codes.index) != unnumbered(scales.index) or codes.shape[:-1] != scales.shape[:-1]:
        return None
    stages: list[tuple[Group, ...]] = [(rounding,), (codes, scales)]
    taken = [codes.output.index, scales.output.index, rounding.output.index]
    loads = [*dict.fromkeys(leaves(numbers))]
    made = _alone(flow, loads[0].ref.tensor, 2) if len(loads) == 1 else None
    if made is not None and made.output.index not in flow.outputs and made.is_elementwise and made.index is None:
        given: tuple[Step, ...] = () if made.shape == made.output.shape else (("reshape", made.output.shape),)
        seen = reindex(made.expr, made.shape, (*given, *loads[0].ref.steps))
        if seen is not None:
            in_place: dict[Expr, Expr] = {loads[0]: seen}
            numbers = substitute(numbers, in_place.get)
            stages.insert(0, (made,))
            taken.append(made.output.index)
    fresh = FreshCodes(numbers, codes, scales, tuple(stages))
    return replace(operand, fresh=fresh), taken


def _alone(flow: Dataflow, tensor: int, count: int) -> Group | None:
    """What computes a tensor that so many groups read, where it is one kernel."""
    made = flow.maker(tensor)
    fits = made is not None and flow.readers[tensor] == count and made.problem is None and not made.beside
    return made if fits else None


def _rounded(code: Expr, operand: Coded) -> Expr | None:
    """The number whose code an expression is."""
    if operand.kind.coding:
        return encoded_number(code, operand.kind)
    if not isinstance(code, Call) or code.fn != "cast" or code.dtype != operand.kind:
        return None
    (whole,) = code.args
    return whole.args[0] if isinstance(whole, Call) and whole.fn == "rint" else None


def _inverts(expr: Expr, rounding: Group) -> bool:
    """Whether an expression is one over the scale of its row."""
    if not isinstance(expr, Call) or expr.fn != "div" or expr.args[0] != _ONE or not isinstance(expr.args[1], Load):
        return False
    load = expr.args[1]
    return load.index is None and load.ref.view.same_elements(rounding.output.view)


def _rows_of(scale: Expr, operand: Coded) -> Expr | None:
    """What the scale of each row makes the largest number of the largest code, as `npu_codes.quantize` computes it."""
    most = Const(1 / LARGEST[operand.kind], FLOAT32) if operand.kind in LARGEST else None
    reduced = _arguments(_arguments(scale, "max", Const(LEAST_SCALE, FLOAT32)), "mul", most)
    (found,) = reduced.args if isinstance(reduced, Call) and reduced.fn == "of_bits" else (None,)
    if not isinstance(found, Reduce) or found.combination.name != "greatest" or len(found.args) != 1:
        return None
    bits = _arguments(found.args[0], "and", Const(0x7FFF_FFFF, INT32))
    return bits.args[0] if isinstance(bits, Call) and bits.fn == "bits" else None


def _arguments(expr: Expr | None, fn: str, constant: Expr | None) -> Expr | None:
    """The first argument of a function whose second one is a constant."""
    fits = isinstance(expr, Call) and expr.fn == fn and len(expr.args) == 2 and expr.args[1] == constant
    return expr.args[0] if fits and isinstance(expr, Call) else None
