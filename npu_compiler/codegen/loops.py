"""Bodies of generated kernels: an elementwise loop nest, or a row at a time where the expression reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.codegen.dialect import Dialect, Printer
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import Operands, merge_rows
from npu_compiler.codegen.plan import Argument
from npu_compiler.expr import Call, Expr, Reduce, reductions, walk
from npu_compiler.symbolic import OpRefusal
from npu_compiler.trace import TracedTensor

__all__ = [
    "RowPhase",
    "RowProgram",
    "elementwise_body",
    "elementwise_operands",
    "flops_of",
    "output_argument",
    "row_operands",
    "row_program",
    "traffic_of",
]


def elementwise_operands(group: Group, tensors: Sequence[TracedTensor], positions: Sequence[str]) -> Operands:
    """The operands of a group without anchor and without reductions."""
    return Operands.resolve(_exprs(group), group.view, tensors, positions)


def elementwise_body(group: Group, operands: Operands, dialect: Dialect) -> str:
    """Statements that compute one element and store it in ``out``."""
    printer = Printer(dialect, operands.names)
    value = printer.value(group.expr)
    address = _address(group, operands, printer)
    storage = dialect.storage[group.output.dtype.name]
    return "\n".join([*printer.lines, f"    out[{address}] = {storage}({value});"])


def output_argument(group: Group) -> Argument:
    """What a kernel binds to write a group's results."""
    return Argument(group.output.index, group.view.offset * group.output.dtype.size, writes=True)


def _exprs(group: Group) -> list[Expr]:
    return [group.expr] if group.index is None else [group.expr, group.index]


def _address(group: Group, operands: Operands, printer: Printer) -> str:
    """Where a value is stored; for a scatter, its index says how much further on."""
    if group.index is None:
        return operands.output
    return f"{operands.output} + int({printer.value(group.index)}) * {group.index_stride}"


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
        phases: The reductions, each after those it depends on.
        body: Statements of the last loop, over the column ``c``.
        value: The result of each column.
        address: Where it is stored.
        width: Columns of the result.
    """

    phases: tuple[RowPhase, ...]
    body: str
    value: str
    address: str
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


def row_program(group: Group, operands: Operands, dialect: Dialect) -> RowProgram:
    """Splits a reducing group into phases."""
    printer = Printer(dialect, operands.names)
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
    address = _address(group, operands, inner)
    return RowProgram(tuple(phases), "\n".join(inner.lines), value, address, group.shape[-1])


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
        inside: set[int] = set()
        for reduce in reductions(expr):
            own = [node for node in walk(reduce.arg) if isinstance(node, Call) and node.fn != "cast"]
            inside.update(map(id, own))
            total += (len(own) + 1) * reduce.extent * positions
        total += positions * sum(
            isinstance(node, Call) and node.fn != "cast" and id(node) not in inside for node in walk(expr)
        )
    return total


def traffic_of(group: Group, tensors: Sequence[TracedTensor]) -> int:
    """Bytes that must move: the output once, and of each operand what the group reads, once."""
    total = prod(group.shape) * group.output.dtype.size
    for index in group.reads():
        tensor = tensors[index]
        total += prod(tensor.shape) * tensor.dtype.size
    return total
