"""Bodies of generated kernels: an elementwise loop nest, or a row at a time where the expression reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.dialect import Dialect, Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import Operands, merge_rows
from npu_compiler.tensor.expr import Call, Checked, Expr, Iota, Load, Reduce, reductions, walk
from npu_compiler.tensor.intervals import interval
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor

__all__ = [
    "Place",
    "RowPhase",
    "RowProgram",
    "elementwise_body",
    "elementwise_operands",
    "flops_of",
    "output_argument",
    "row_operands",
    "row_program",
    "scatter_place",
    "traffic_of",
]


def elementwise_operands(group: Group, tensors: Sequence[TracedTensor], positions: Sequence[str]) -> Operands:
    """The operands of a group without anchor and without reductions."""
    return Operands.resolve(_exprs(group), group.view, tensors, positions)


def elementwise_body(group: Group, operands: Operands, dialect: Dialect) -> str:
    """Statements that compute one element and store it in ``out``."""
    printer = Printer(dialect, operands.names)
    value = printer.value(group.expr)
    place = scatter_place(group, operands.output, printer)
    storage = dialect.storage[group.output.dtype.name]
    return "\n".join([*printer.lines, f"    {place.condition}out[{place.address}] = {storage}({value});"])


def output_argument(group: Group) -> Argument:
    """What a kernel binds to write a group's results."""
    return Argument(group.output.index, group.view.offset * group.output.dtype.size, writes=True)


def _exprs(group: Group) -> list[Expr]:
    return [group.expr] if group.index is None else [group.expr, group.index]


class Place(NamedTuple):
    """Where a value is stored, and the condition for storing it, as the head of a statement or empty."""

    address: str
    condition: str


def scatter_place(group: Group, address: str, printer: Printer) -> Place:
    """Where a group's value is stored: for a scatter, its index says how far behind `address`, or that it is not."""
    if group.index is None:
        return Place(address, "")
    index = printer.value(group.index)
    low, _ = interval(group.index) or (0, 0)
    return Place(f"{address} + int({index}) * {group.index_stride}", f"if ({index} >= 0) " if low < 0 else "")


@dataclass(frozen=True)
class RowPhase:
    """One reduction of a row kernel.

    Attributes:
        name: Variable that holds the finished result.
        kind: ``sum``, ``max`` or ``min``.
        register: Its type.
        identity: The value that changes nothing.
        body: Statements of the loop over the column ``c``.
        value: What each column contributes.
        extent: Columns.
    """

    name: str
    kind: str
    register: str
    identity: str
    body: str
    value: str
    extent: int


@dataclass(frozen=True)
class RowProgram:
    """A row kernel: reductions in order, then a loop over `width` results.

    Attributes:
        head: Statements ahead of all loops: indices that are the same all along a row are checked once.
        phases: The reductions, each after those it depends on.
        body: Statements of the last loop, over the column ``c``.
        value: The result of each column.
        place: Where it is stored.
        width: Columns of the result.
    """

    head: str
    phases: tuple[RowPhase, ...]
    body: str
    value: str
    place: Place
    width: int


def row_operands(group: Group, tensors: Sequence[TracedTensor], positions: Sequence[str], prefix: str = "") -> Operands:
    """The operands of a group without anchor whose expression reduces over the last dimension.

    Args:
        group: The group.
        tensors: The trace's tensors.
        positions: Names of the positions of the row's dimensions and, last, the column's.
        prefix: What the names of pointers and parameters begin with.
    """
    return Operands.resolve(_exprs(group), group.view, tensors, positions, merge_rows, prefix=prefix)


def row_program(group: Group, operands: Operands, dialect: Dialect, *, hoisting: bool = True) -> RowProgram:
    """Splits a reducing group into phases.

    Args:
        group: The group.
        operands: Of `row_operands`.
        dialect: The language.
        hoisting: Whether the kernel has a place for `RowProgram.head`.
    """
    printer = Printer(dialect, operands.names)
    for check in _uniform_checks(group, operands) if hoisting else ():
        printer.value(check)
    phases = []
    for number, node in enumerate(reductions(group.expr)):
        inner = printer.scope("        ")
        value = inner.value(node.arg)
        name = f"r{number}"
        identity = _identity(node, dialect)
        phases.append(
            RowPhase(
                name, node.kind, dialect.register(node.dtype), identity, "\n".join(inner.lines), value, node.extent
            )
        )
        printer.define(node, name)
    inner = printer.scope("        ")
    value = inner.value(group.expr)
    place = scatter_place(group, operands.output, inner)
    return RowProgram("\n".join(printer.lines), tuple(phases), "\n".join(inner.lines), value, place, group.shape[-1])


def _uniform_checks(group: Group, operands: Operands) -> list[Checked]:
    """Checks of indices that are the same all along a row, and are made wherever a row is computed."""
    nodes = dict.fromkeys(node for expr in _exprs(group) for node in walk(expr) if isinstance(node, Checked))
    return [node for node in nodes if not operands.names.checks[node][1] and _is_uniform(node)]


def _is_uniform(check: Checked) -> bool:
    views = [node.ref.view for node in walk(check) if isinstance(node, Load)]
    views += [node.view for node in walk(check) if isinstance(node, Iota)]
    return all(not view.strides or view.strides[-1] == 0 or view.shape[-1] == 1 for view in views)


def _identity(node: Reduce, dialect: Dialect) -> str:
    if node.kind == "sum":
        return dialect.literal(0, node.dtype)
    if node.dtype.is_float:
        return dialect.literal(float("-inf" if node.kind == "max" else "inf"), node.dtype)
    if node.dtype.is_integer:
        register = dialect.register(node.dtype)
        greatest = 2 ** (31 if register == "int" else 63) - 1
        return f"({register}(-{greatest}) - 1)" if node.kind == "max" else f"{register}({greatest})"
    raise OpRefusal(f"the {node.kind}imum of {node.dtype} is not supported")


def flops_of(exprs: Sequence[Expr], positions: int) -> int:
    """Arithmetic of evaluating expressions at so many positions; a reduction counts over its extent."""
    total = 0
    for expr in exprs:
        inside: set[Expr] = set()
        for reduce in reductions(expr):
            own = [node for node in walk(reduce.arg) if isinstance(node, Call) and node.fn != "cast"]
            inside.update(own)
            total += (len(own) + 1) * reduce.extent * positions
        total += positions * sum(
            isinstance(node, Call) and node.fn != "cast" and node not in inside for node in walk(expr)
        )
    return total


def traffic_of(group: Group, tensors: Sequence[TracedTensor]) -> int:
    """Bytes that must move: the output once, and of each operand what the group reads, once."""
    total = prod(group.shape) * group.output.dtype.size
    for index in group.reads():
        tensor = tensors[index]
        total += prod(tensor.shape) * tensor.dtype.size
    return total
