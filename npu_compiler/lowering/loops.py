"""Bodies of generated kernels: an elementwise loop nest, or a row at a time where the expression reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.dialect import Dialect, LeafNames, Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import Operands, merge_rows
from npu_compiler.tensor.expr import Call, Checked, Combination, Expr, Iota, Load, Slot, reductions, reindex, walk
from npu_compiler.tensor.intervals import interval
from npu_compiler.tensor.trace import TracedTensor

__all__ = [
    "Place",
    "RowPhase",
    "RowProgram",
    "combine_text",
    "elementwise_body",
    "elementwise_operands",
    "flops_of",
    "in_memory_order",
    "output_argument",
    "row_operands",
    "row_program",
    "scatter_place",
    "state_names",
    "traffic_of",
]


def in_memory_order(group: Group) -> Group:
    """The same elementwise work over dimensions in the order in which its output lies: neighbours are side by side."""
    sizes, strides = group.view.shape, group.view.strides
    order = tuple(sorted(range(len(sizes)), key=lambda dim: -strides[dim] if sizes[dim] > 1 else -sum(strides)))
    if not group.is_elementwise or group.index is not None or list(order) == sorted(order):
        return group
    expr = reindex(group.expr, group.shape, (("permute", order),))
    if expr is None:
        return group
    view = group.view.permute(order)
    return replace(group, expr=expr, shape=view.shape, view=view)


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
    """Where a group's value is stored: at `address`, or as far behind as a scatter's index says, if that is not -1."""
    if group.index is None:
        return Place(address, "")
    index = printer.value(group.index)
    low, _ = interval(group.index) or (0, 0)
    return Place(f"{address} + int({index}) * {group.index_stride}", f"if ({index} >= 0) " if low < 0 else "")


@dataclass(frozen=True)
class RowPhase:
    """One reduction of a row kernel.

    Attributes:
        name: Variable that holds the finished result; with several numbers in a state, what their names begin with.
        combination: How two states become one.
        registers: The type of each number of a state.
        identity: Each number of the state that changes nothing.
        body: Statements of the loop over the column ``c``.
        values: The numbers that each column contributes.
        extent: Columns.
        head: Statements ahead of the loop: what is the same for all columns.
    """

    name: str
    combination: Combination
    registers: tuple[str, ...]
    identity: tuple[str, ...]
    body: str
    values: tuple[str, ...]
    extent: int
    head: tuple[str, ...] = ()

    def names(self, state: str) -> tuple[str, ...]:
        """The variables that hold the numbers of a state."""
        return state_names(state, len(self.registers))


def state_names(state: str, count: int) -> tuple[str, ...]:
    """The variables that hold the numbers of a state: the state's own name where it is one number."""
    return (state,) if count == 1 else tuple(f"{state}_s{item}" for item in range(count))


def combine_text(
    combination: Combination, left: Sequence[str], right: Sequence[str], dialect: Dialect, indent: str
) -> tuple[list[str], list[str]]:
    """Statements that combine two states, and the text of each number of the result.

    Args:
        combination: How they are combined.
        left, right: The numbers of two states.
        dialect: The language.
        indent: What each statement begins with.
    """
    if combination.function is not None:
        return [], [dialect.call(combination.function, [*left, *right], combination.values[0].dtype)]
    printer = Printer(dialect, LeafNames({}, {}, {}), indent, "w")
    for slot, text in zip(combination.slots, (*left, *right), strict=True):
        printer.define(slot, text)
    values = [printer.variable_of(v) if isinstance(v, Slot) else printer.value(v) for v in combination.values]
    return printer.lines, values


@dataclass(frozen=True)
class RowProgram:
    """A row kernel: reductions in order, then a loop over `width` results.

    Attributes:
        head: Statements ahead of all loops: indices that are the same all along a row are checked once.
        phases: The reductions, each after those it depends on.
        tail: Statements behind them: what is the same for all columns of the last loop.
        body: Statements of the last loop, over the column ``c``.
        value: The result of each column.
        place: Where it is stored.
        width: Columns of the result.
        beside, beside_body: What the group stores for each row, and the statements that compute it; else empty.
    """

    head: str
    phases: tuple[RowPhase, ...]
    body: str
    value: str
    place: Place
    width: int
    beside: str = ""
    beside_body: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()


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
        hoisting: Whether the kernel has a place for `RowProgram.head` and `RowProgram.tail`.
    """
    printer = Printer(dialect, operands.names)
    for check in _uniform_checks(group, operands) if hoisting else ():
        printer.value(check)
    head = "\n".join(printer.lines)
    phases: dict[object, RowPhase] = {}  # by what is walked over
    for node in reductions(group.expr):
        if node.row not in phases:
            before = _hoisted(printer, node.args) if hoisting else ()
            inner = printer.scope("        ")
            values = tuple(map(inner.value, node.args))
            registers = tuple(dialect.register(arg.dtype) for arg in node.args)
            identity = tuple(dialect.literal(const.value, const.dtype) for const in node.combination.identity)
            body = "\n".join(inner.lines)
            name = f"r{len(phases)}"
            phases[node.row] = RowPhase(name, node.combination, registers, identity, body, values, node.extent, before)
        printer.define(node, phases[node.row].names(phases[node.row].name)[node.item])
    tail = _hoisted(printer, [group.expr]) if hoisting else ()
    inner = printer.scope("        ")
    value = inner.value(group.expr)
    place = scatter_place(group, operands.output, inner)
    body, found = "\n".join(inner.lines), tuple(phases.values())
    if group.beside is None:
        return RowProgram(head, found, body, value, place, group.shape[-1], tail=tail)
    alone = printer.scope("        ")
    beside = alone.value(group.beside[1])
    return RowProgram(head, found, body, value, place, group.shape[-1], beside, tuple(alone.lines), tail)


def _hoisted(printer: Printer, exprs: Sequence[Expr]) -> tuple[str, ...]:
    """Statements for what expressions have that is the same for all columns of the loop to come."""
    before = len(printer.lines)
    for expr in exprs:
        printer.hoist(expr)
    return tuple(printer.lines[before:])


def _uniform_checks(group: Group, operands: Operands) -> list[Checked]:
    """Index checks that are the same at every column of a row, and that no condition guards: made once for each row."""
    nodes = dict.fromkeys(node for expr in _exprs(group) for node in walk(expr) if isinstance(node, Checked))
    return [node for node in nodes if not operands.names.checks[node][1] and _is_uniform(node)]


def _is_uniform(check: Checked) -> bool:
    views = [node.ref.view for node in walk(check) if isinstance(node, Load)]
    views += [node.view for node in walk(check) if isinstance(node, Iota)]
    return all(not view.strides or view.strides[-1] == 0 or view.shape[-1] == 1 for view in views)


def flops_of(exprs: Sequence[Expr], positions: int) -> int:
    """Arithmetic of evaluating expressions at so many positions; a reduction counts over its extent."""
    total = 0
    for expr in exprs:
        inside: set[Expr] = set()
        for row in dict.fromkeys(reduce.row for reduce in reductions(expr)):
            combination, args, extent = row
            own = _calls(args)
            inside.update(own)
            total += (len(own) + len(_calls(combination.values))) * extent * positions
        total += positions * sum(node not in inside for node in _calls([expr]))
    return total


def _calls(exprs: Sequence[Expr]) -> list[Call]:
    """The distinct operations of some expressions, but for conversions."""
    nodes = dict.fromkeys(node for expr in exprs for node in walk(expr))
    return [node for node in nodes if isinstance(node, Call) and node.fn != "cast"]


def traffic_of(group: Group, tensors: Sequence[TracedTensor]) -> int:
    """Bytes that must move through device memory at the least: the results once, and each tensor that is read once."""
    total = prod(group.shape) * group.output.dtype.size
    for index in (*group.reads(), *group.stores()[1:]):
        tensor = tensors[index]
        total += prod(tensor.shape) * tensor.dtype.size
    return total
