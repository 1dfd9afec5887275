"""Weights in codes of a byte: which expressions are codes times a scale, by which a product's epilogue multiplies.

A product's sums run along k. What is the same all along it is a factor of the sum, so that kernels load the codes as
they are, and multiply once for each result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from npu_compiler.dtypes import BOOL, FLOAT32, DType
from npu_compiler.lowering.dialect import Dialect, Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.problems.forms import CodedRows, Computed, Dequantised, kind_of_codes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.schedule import needed_groups
from npu_compiler.lowering.value import MAX_READS
from npu_compiler.records import changed
from npu_compiler.tensor.expr import (
    Call,
    Const,
    Expr,
    Iota,
    Load,
    Ref,
    leaves,
    moves,
    reindex,
    substitute,
    varies,
    walk,
)
from npu_compiler.tensor.rounded import under_casts
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["NumberFunction", "as_codes", "as_coded_rows", "coded_parts", "note_of_stored", "number_function"]
__all__ += ["with_scale_behind"]

_MOST_NAMED = 3


def as_codes(computed: Computed, position: int, tensors: Sequence[TracedTensor]) -> Dequantised | None:
    """An operand of a product as codes, where what computes it makes each element of a byte; else None.

    Args:
        computed: The operand.
        position: 0 for the left matrix, [..., m, k], 1 for the right one, [..., k, n].
        tensors: The trace's tensors.
    """
    shape, k = computed.shape, len(computed.shape) - 1 - position
    if computed.is_of_rows:
        return None
    expr, scale = _factored(computed.expr, shape, k)
    codes = [load for load in leaves(expr) if moves(load, shape, (k,))]
    rest = [leaf for leaf in walk(expr) if isinstance(leaf, Load | Iota) and leaf not in codes]
    others = [dim for dim in range(len(shape)) if dim != len(shape) - 2 + position]
    if len(codes) != 1 or not expr.dtype.is_float or any(moves(leaf, shape, others) for leaf in rest):
        return None
    (code,) = codes
    ref = code.ref if code.ref.view.shape == shape else code.ref.apply(("expand", shape))
    if ref is None or code.index is not None or code.dtype.size != 1 or code.dtype == BOOL:
        return None
    made = Dequantised(tensors[ref.tensor], ref, expr, scale, code)
    return None if made.by_row(position) is None else made


def as_coded_rows(computed: Computed, position: int, tensors: Sequence[TracedTensor]) -> CodedRows | None:
    """Keys or values of attention as codes, where each is the number of one by the scale of its row; else None.

    Args:
        computed: The operand, [batch, groups, length, size].
        position: Which operand: 1 for keys, 2 for values.
        tensors: The trace's tensors.
    """
    shape = computed.shape
    if position not in (1, 2) or computed.is_of_rows or len(shape) != 4:
        return None
    parts = coded_parts(computed.expr, shape)
    if parts is None:
        return None
    kind, code, scale = parts
    if code.index is not None or scale.index is not None or code.ref.view.shape != shape:
        return None
    by_row = Operand(tensors[scale.ref.tensor], Ref(scale.ref.tensor, scale.ref.view.expand(shape)))
    return CodedRows(tensors[code.ref.tensor], code.ref, kind, by_row, computed)


def coded_parts(expr: Expr, shape: tuple[int, ...]) -> tuple[DType, Load, Load] | None:
    """The data type of codes of a byte, these, and the scales of their rows, where an expression is their numbers.

    Args:
        expr: Over `shape`, whose last dimension is a row.
        shape: Of what it computes.
    """
    number, factor = _factored(expr, shape, len(shape) - 1)
    scale = None if factor is None else under_casts(factor)
    if not isinstance(scale, Load) or not scale.dtype.is_float:
        return None
    kinds = {code: kind for code in leaves(number) if (kind := kind_of_codes(number, code)) is not None}
    fitting = [(kind, code, scale) for code, kind in kinds.items() if kind.size == 1 and kind != BOOL]
    return fitting[0] if fitting else None


@dataclass(frozen=True)
class NumberFunction:
    """A function of a code and of the row that it is in: the number that it stands for, a float32.

    Attributes:
        operands: What it reads beside the code: zero points. Their pointers and parameters begin with ``w``.
        lines: Statements over ``code`` and ``row``.
        value: The result.
    """

    operands: Operands
    lines: tuple[str, ...]
    value: str


def number_function(
    codes: Dequantised, position: int, tensors: Sequence[TracedTensor], dialect: Dialect
) -> NumberFunction:
    """The function that makes numbers of an operand's codes.

    Args:
        codes: The operand.
        position: As in `as_codes`.
        tensors: The trace's tensors.
        dialect: The language.

    Raises:
        OpRefusal: What it reads is too large.
    """
    expr, rows = codes.by_row(position), codes.shape[position - 2]
    assert expr is not None
    anchors = {codes.tensor.index: "code"}
    operands = Operands.resolve([expr], View((rows,), (0,)), tensors, ("row",), anchors=anchors, prefix="w")
    printer = Printer(dialect, operands.names)
    value = printer.value(expr)
    return NumberFunction(operands, tuple(printer.lines), value)


def _factored(expr: Expr, shape: tuple[int, ...], k: int) -> tuple[Expr, Expr | None]:
    """An expression without the factors that are the same all along a dimension, and these; conversions that only round
    are left out.
    """
    scale: Expr | None = None
    while isinstance(expr, Call):
        if expr.fn == "cast" and expr.dtype.is_float and expr.args[0].dtype.is_float:
            expr = expr.args[0]
            continue
        if expr.fn not in ("mul", "div") or not expr.dtype.is_float:
            break
        left, right = expr.args
        if expr.fn == "mul" and not varies(left, shape, (k,)):
            left, right = right, left
        if varies(right, shape, (k,)) or not varies(left, shape, (k,)):
            break
        if scale is None:
            scale = right if expr.fn == "mul" else Call("div", (Const(1.0, FLOAT32), right), FLOAT32)
        else:
            scale = Call(expr.fn, (scale, right), FLOAT32)
        expr = left
    return expr, scale


def with_scale_behind(group: Group, position: int, operand: Dequantised) -> Group | None:
    """A group around a product whose operand is loaded as codes; its epilogue multiplies by their scale.

    Returns:
        The group, or None where the epilogue cannot say the scale, or would read too many tensors.
    """
    assert isinstance(group.problem, Product)
    problem, scaled = group.problem, group.loading(position, operand)
    if operand.scale is not None:
        k = len(operand.shape) - 1 - position
        steps = (("slice", (k, 0, 1, 1)), ("expand", problem.shape))
        scale = reindex(operand.scale, operand.shape, steps)
        own = [load for load in leaves(group.expr) if load.ref.tensor == problem.result.index]
        factors = {load: None if scale is None else reindex(scale, problem.shape, load.ref.steps) for load in own}
        if any(factor is None for factor in factors.values()):
            return None
        products: dict[Expr, Expr] = {
            load: Call("mul", (load, factor), FLOAT32) for load, factor in factors.items() if factor is not None
        }
        scaled = changed(scaled, expr=substitute(group.expr, products.get))
    return scaled if len(scaled.reads()) <= MAX_READS else None


def _last_nodes(maker: Group) -> Sequence[str]:
    """The node whose result a group computes; with those of which it only brings the elements to other places."""
    is_bare = maker.shape and maker.index is None and coded_parts(maker.expr, maker.shape) is not None
    return maker.nodes if is_bare else maker.nodes[-1:]


def note_of_stored(
    groups: Mapping[int, list[Group]], outputs: Collection[int], dequantised: Collection[str], target: str
) -> tuple[str, ...]:
    """A note on operands that are made of codes and stored ahead of what reads them, as no template loads the codes.

    Args:
        groups: What computes each tensor, by its index.
        outputs: What must be in memory in the end.
        dequantised: Names of the nodes that make numbers of codes.
        target: Name of the target.
    """
    names: dict[str, None] = {}
    for group in needed_groups(groups, outputs):
        for operand in () if group.problem is None else group.problem.operands:
            makers = groups.get(operand.tensor.index, []) if type(operand) is Operand else []
            alone = (maker for maker in makers if maker.problem is None)
            names.update((name, None) for maker in alone for name in _last_nodes(maker) if name in dequantised)
    if not names:
        return ()
    shown = ", ".join(f"'{name}'" for name in [*names][:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (f"{shown}{more}: stored as numbers before they are read, as '{target}' loads no such codes there",)
