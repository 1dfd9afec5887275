"""Rows that a kernel computes eight neighbours at a time: what multiplies all of a row waits for its results.

``(x * factor(x) * gain) @ w`` is ``((x * gain) @ w) * factor(x)``: the row of an RMS norm needs no sum of all of it
before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import PackedLoad, each_element, packed_loads, with_packs
from cuda_compiler.rows import ask_ahead, vector_operands
from npu_compiler.dtypes import BFLOAT16, FLOAT32
from npu_compiler.lowering.anchors import pointer_macros, pointer_parameters
from npu_compiler.lowering.dialect import LeafNames, Printer
from npu_compiler.lowering.loops import flops_of
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Reduce, has_reduce, leaves, reductions, walk

__all__ = ["octet_prologue"]

_SIZE = 8


def octet_prologue(operand: Computed, lowering: Lowering, blocks: int) -> Prologue | None:
    """Device functions of rows that are such products; None where they are something else.

    ``load_octet`` loads what eight elements of a row are made of, and waits for none of it. ``row_octet`` computes them
    without the row's factor, and returns their part of the sum of which ``row_factor`` makes that. The macro ``FACTOR``
    is 0 where there is none. Where they are products of numbers of bfloat16, ``RowOctet::are_products`` gives these.

    Args:
        operand: The rows.
        lowering: Where the trace's tensors are.
        blocks: Blocks that compute it.
    """
    group = operand.row
    found = _Parts.of(group.expr, group.shape[-1])
    if found is None or group.shape[-1] % _SIZE or any(isinstance(node, Checked) for node in walk(group.expr)):
        return None
    operands, statements = vector_operands(group, lowering)
    loads = packed_loads(operands, [group.expr], _SIZE)
    inner = Printer(CUDA, with_packs(operands, loads).names, " " * 8)
    added = None if found.added is None else inner.value(found.added)
    value = inner.value(found.element)
    packs = [(f"Pack<{load.storage}, {_SIZE}>", f"x{number}", load.source) for number, load in enumerate(loads)]
    parameters = f"{pointer_parameters(operands, CUDA)}const Params& p)"
    lines = [
        "struct RowOctet {",
        *(f"    {pack} {name};" for pack, name, _ in packs),
        *_product_lines(found.element, loads),
        "};",
        f"{CUDA.inline} RowOctet load_octet(int row, int c, {parameters}",
        "{",
        *statements,
        "    RowOctet octet;",
        *(f"    octet.{name} = {source};" for _, name, source in packs),
        "    return octet;",
        "}",
        f"{CUDA.inline} float row_octet(const RowOctet& octet, int row, int c, float (&value)[{_SIZE}], {parameters}",
        "{",
        *statements,
        *(f"    const {pack}& {name} = octet.{name};" for pack, name, _ in packs),
        "    float part = 0.0f;",
        *each_element("c", _SIZE, "    "),
        *inner.lines,
        f"        value[u] = {value};",
        *([] if added is None else [f"        part += {added};"]),
        "    }",
        "    return part;",
        "}",
        *ask_ahead(loads, operands, lowering, group.shape[-1]),
        f"{CUDA.inline} float row_factor(float sum)",
        "{",
        *found.factor_lines(),
        "}",
    ]
    return Prologue(
        (operands,),
        macros={"FACTOR": int(found.sum is not None), **pointer_macros("VECTOR", operands, CUDA)},
        text="\n".join(lines),
        flops=blocks * prod(group.shape[:-1]) * flops_of([operand.expr], group.shape[-1]),
    )


@dataclass(frozen=True)
class _Parts:
    """A row as a product of what it makes of each element, and of a factor.

    Attributes:
        element: Over the row.
        factor: A function of the sum alone; None where there is none.
        sum: Over the row.
        added: What each element adds to the sum, but for a constant by which all of that is multiplied.
        constant: That.
    """

    element: Expr
    factor: Expr | None = None
    sum: Reduce | None = None
    added: Expr | None = None
    constant: Const | None = None

    @classmethod
    def of(cls, expr: Expr, width: int) -> Self | None:
        """The parts of a row of so many elements; None where it is something else."""
        element, factor = _split(expr)
        if element is None or has_reduce(element) or not _is_number(element):
            return None
        if factor is None:
            return cls(element)
        found, *others = reductions(factor)
        if others or found.combination.function != "add" or found.extent != width or has_reduce(found.args[0]):
            return None
        if not all(map(_is_number, (factor, found, found.args[0]))):
            return None
        return cls(element, factor, found, *_without_constant(found.args[0]))

    def factor_lines(self) -> list[str]:
        """Statements that give the factor, of a row's ``sum``."""
        if self.factor is None or self.sum is None:
            return ["    return 1.0f;"]
        printer = Printer(CUDA, LeafNames({}, {}, {}))
        printer.define(self.sum, "sum" if self.constant is None else f"(sum * {printer.value(self.constant)})")
        value = printer.value(self.factor)
        return [*printer.lines, f"    return {value};"]


def _product_lines(element: Expr, loads: Sequence[PackedLoad]) -> list[str]:
    """What an octet says of its elements as products, of two of its packs."""
    stored = CUDA.storage[BFLOAT16.name]
    names: dict[Expr, str] = {load.leaf: f"x{n}" for n, load in enumerate(loads) if load.storage == stored}
    args = element.args if isinstance(element, Call) and element.fn == "mul" else ()
    factors = [names.get(_before_casts(arg)) for arg in args]
    given = [] if None in factors else factors
    pack = f"Pack<{stored}, {_SIZE}>"
    return [
        f"    {CUDA.inline} bool are_products({pack}& left, {pack}& right) const",
        "    {",
        *(f"        {name} = {factor};" for name, factor in zip(("left", "right"), given, strict=False)),
        f"        return {str(bool(given)).lower()};",
        "    }",
    ]


def _before_casts(expr: Expr) -> Expr:
    """What stands below conversions that keep each number of bfloat16."""
    while isinstance(expr, Call) and expr.fn == "cast" and expr.dtype in (BFLOAT16, FLOAT32):
        (expr,) = expr.args
    return expr


def _without_constant(expr: Expr) -> tuple[Expr, Const | None]:
    """An expression as a product of another one and a constant; None where there is none."""
    if isinstance(expr, Call) and expr.fn == "mul":
        for other, constant in (expr.args, reversed(expr.args)):
            if isinstance(constant, Const) and _is_number(constant):
                return other, constant
    return expr, None


def _is_number(expr: Expr) -> bool:
    return CUDA.register(expr.dtype) == CUDA.register(FLOAT32)


def _split(expr: Expr) -> tuple[Expr | None, Expr | None]:
    """An expression as a product of one without sums, and of one of sums alone; either is None where it is 1.

    Conversions that only round are left out. What is no such product comes first as it is.
    """
    if not has_reduce(expr):
        return expr, None
    if isinstance(expr, Call) and expr.fn == "cast" and _only_rounds(expr):
        return _split(expr.args[0])
    if isinstance(expr, Call) and expr.fn == "mul":
        (left, factor), (right, by) = map(_split, expr.args)
        return _times(left, right), _times(factor, by)
    if isinstance(expr, Call) and expr.fn == "div" and not has_reduce(expr.args[0]):
        divisor, by = _split(expr.args[1])
        if divisor is None and by is not None:
            return expr.args[0], Call("div", (Const(1.0, FLOAT32), by), FLOAT32)
    summed = {load for each in reductions(expr) for load in leaves(each)}
    return (None, expr) if summed.issuperset(leaves(expr)) else (expr, None)


def _times(left: Expr | None, right: Expr | None) -> Expr | None:
    return left or right if left is None or right is None else Call("mul", (left, right), FLOAT32)


def _only_rounds(cast: Call) -> bool:
    """Whether a conversion is from number to number, and not to one of few bits."""
    return _is_number(cast) and _is_number(cast.args[0]) and cast.dtype.size > 1
