"""How a kernel's own positions become those of the operands that its generated part reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument
from npu_compiler.lowering.operands import Merge, Operands, Pointer, merge_groups
from npu_compiler.lowering.params import ParamStruct, ints
from npu_compiler.lowering.target import Lowering
from npu_compiler.records import changed
from npu_compiler.tensor.expr import has_reduce
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.view import View

__all__ = ["AXES", "STORED", "Follower", "Positions", "epilogue_positions", "inner_axes", "unpack"]

AXES = tuple(f"i{axis}" for axis in range(8))
"""Names of the positions along the dimensions of an iteration space."""

_POSITIONS = ("batch", "row", "col")
STORED = "stored"
"""What an epilogue calls the element of its own output, as that is stored, where it has followers."""


@dataclass(frozen=True)
class Follower:
    """A follower of a group, as its epilogue stores it.

    Attributes:
        group: The follower.
        pointer: Name of the pointer that its results go to.
        address: Where there, by the epilogue's positions; that of the sum of a part of a row has the number of the
            part, ``part``, in the place of the column.
    """

    group: Group
    pointer: str
    address: str


def inner_axes(count: int) -> tuple[str, ...]:
    """Names of the positions along the innermost dimensions of an iteration space."""
    return AXES[len(AXES) - count :]


@dataclass(frozen=True)
class Positions:
    """Operands, and the statements that lead to their positions.

    Attributes:
        operands: The operands over the merged dimensions.
        statements: Statements that unpack the kernel's positions.
        extents: Sizes that these need, as parameters.
        inner: Name of the position along which neighbours lie.
        followers: The followers of the group.
        functions: Text of functions that loads are spelled as calls of.
    """

    operands: Operands
    statements: tuple[str, ...]
    extents: dict[str, int]
    inner: str
    followers: tuple[Follower, ...] = ()
    functions: str = ""

    @property
    def values(self) -> dict[str, int]:
        """The parameters that operands and statements need."""
        return {**self.extents, **dict(self.operands.fields)}

    def struct(self, name: str = "Params") -> ParamStruct:
        """A struct of these parameters alone."""
        return ParamStruct(name, ints(*self.values))

    def arguments(self, group: Group) -> tuple[Argument, ...]:
        """What a kernel that computes a group binds for it: the output, then the operands."""
        return (output_argument(group), *(argument for argument, _ in self.operands.pointers))


def unpack(linear: str, axes: Sequence[str], sizes: Sequence[int], extents: dict[str, int] | None = None) -> list[str]:
    """Statements that split a linear index into positions.

    Args:
        linear: The index.
        axes: Names of the positions, outermost first.
        sizes: Extents of the dimensions.
        extents: Where given, sizes become parameters that are added here, so that a kernel serves several sizes;
            else they are constants, which turn divisions into multiplications.
    """
    lines: list[str] = []
    rest = linear
    for axis, size in list(zip(axes, sizes, strict=True))[:0:-1]:
        extent = str(size)
        if extents is not None:
            extents[f"extent_{axis}"] = size
            extent = f"p.extent_{axis}"
        lines.append(f"    int {axis} = {rest} % {extent};")
        lines.append(f"    int above_{axis} = {rest} / {extent};")
        rest = f"above_{axis}"
    if axes:
        lines.append(f"    int {axes[0]} = {rest};")
    return lines


def epilogue_positions(
    group: Group, lowering: Lowering, result: str, sized: bool = False, prefix: str = ""
) -> Positions:
    """The operands of an epilogue over a kernel's positions ``batch``, ``row`` and ``col``.

    Mostly every operand walks each of them with one stride. Where one does not, as a bias along the width of an image,
    the positions are unpacked to one for each dimension, and there is no place for followers.

    Args:
        group: What to compute, with a problem.
        lowering: Where the trace's tensors are.
        result: How the kernel calls the problem's own result.
        sized: Whether the sizes that unpacking needs become parameters, instead of constants.
        prefix: As in `Operands`.

    Raises:
        OpRefusal: An operand is too large.
    """
    assert group.problem is not None
    exprs, dims, anchors = [group.expr], group.problem.dims, {group.problem.result.index: result}
    if group.followers:
        exprs, anchors = [*exprs, *(each.expr for each in group.followers)], {**anchors, group.output.index: STORED}
    try:
        merge = merge_groups(dims)
        operands = Operands.resolve(exprs, group.view, lowering.tensors, _POSITIONS, merge, anchors, prefix)
        return _with_followers(Positions(operands, (), {}, _POSITIONS[-1]), group, merge)
    except OpRefusal:
        pass  # or an operand is too large, which the second attempt says again
    order = [dim for part in dims for dim in part]
    names = [AXES[dim] for dim in order]
    each = merge_groups([(dim,) for dim in order])
    operands = Operands.resolve(exprs, group.view, lowering.tensors, names, each, anchors, prefix)
    extents: dict[str, int] = {}
    statements: list[str] = []
    for position, part in zip(_POSITIONS, dims, strict=True):
        axes, sizes = [AXES[dim] for dim in part], [group.shape[dim] for dim in part]
        statements += unpack(position, axes, sizes, extents if sized else None)
    return Positions(operands, tuple(statements), extents, names[-1])


def _with_followers(found: Positions, group: Group, merge: Merge) -> Positions:
    """The same operands, and behind them what followers are stored to."""
    for number, each in enumerate(group.followers):
        summed = has_reduce(each.expr)
        view = View(each.view.shape[:-1], each.view.strides[:-1], each.view.offset) if summed else each.view
        positions = (*_POSITIONS[:-1], "part" if summed else _POSITIONS[-1])
        place = Operands.resolve([], view, (), positions, merge, prefix=f"f{number}")
        pointer = f"{found.operands.prefix}e{len(found.operands.pointers)}"
        stored = Pointer(Argument(each.output.index, view.offset * each.output.dtype.size, True), each.output.dtype)
        pointers, fields = (*found.operands.pointers, stored), (*found.operands.fields, *place.fields)
        operands = changed(found.operands, pointers=pointers, fields=fields)
        found = changed(found, operands=operands, followers=(*found.followers, Follower(each, pointer, place.output)))
    return found
