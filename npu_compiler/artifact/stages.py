"""Weights that are computed when they are loaded: a few tensors, each an expression over those ahead of it.

A stage is a list of instructions, as plain data. What a file says of them is checked before anything is computed: an
instruction reads only earlier ones, a stage only earlier tensors, and no tensor is larger than what the recipe reads
and gives can explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import DType
from npu_compiler.errors import ProgramFormatError, WeightError
from npu_compiler.tensor.evaluate import IndexFault, evaluate
from npu_compiler.tensor.expr import (
    FUNCTIONS,
    Call,
    Checked,
    Combination,
    Const,
    Expr,
    Iota,
    Load,
    Reduce,
    Ref,
    Slot,
    walk,
)
from npu_compiler.tensor.view import View

__all__ = ["Instruction", "Stage", "check_stages", "encoded", "is_computable", "run_stages"]

Array = NDArray[Any]
_MOST_INSTRUCTIONS = 192  # of a stage
_MOST_STAGES = 256
MOST_ELEMENTS = 1 << 26  # of a tensor, or of the rows that one reduces
_MOST_IN_ALL = 4 * MOST_ELEMENTS  # of the tensors of a recipe, which are held until it is done
_MOST_WORK = 1 << 30  # elements by instructions
_MOST_RANK = 16
_MOST_STRIDE = 1 << 40


@dataclass(frozen=True)
class Instruction:
    """A part of an expression.

    Attributes:
        kind: ``const``, ``load``, ``iota``, ``call``, ``reduce``, ``checked`` or ``slot``.
        dtype: Of its value.
        args: Numbers of earlier instructions: its operands.
        fn: Of a call: a function of expressions, or ``cast``.
        numbers: Integers that it needs: those of a view are its offset, its shape and its strides.
        value: Of a constant of floating point.
    """

    kind: str
    dtype: DType
    args: tuple[int, ...] = ()
    fn: str = ""
    numbers: tuple[int, ...] = ()
    value: float = 0.0


@dataclass(frozen=True)
class Stage:
    """A tensor: the value of the last of its instructions, at each position.

    The tensors that a recipe reads have the first numbers, its stages the following ones.

    Attributes:
        shape, dtype: Of the tensor.
        code: The instructions; none for a constant.
        data: For a constant: its elements, row-major.
    """

    shape: tuple[int, ...]
    dtype: DType
    code: tuple[Instruction, ...]
    data: bytes = b""


# ---- from expressions


def encoded(expr: Expr, shape: tuple[int, ...], dtype: DType, numbers: Mapping[int, int]) -> Stage:
    """An expression as a stage.

    Args:
        expr: Over `shape`.
        shape, dtype: Of what it makes.
        numbers: By the index of a tensor in the trace its number in the recipe.
    """
    code = _Code(numbers)
    code.number(expr)
    return Stage(shape, dtype, tuple(code.lines))


class _Code:
    """Instructions for expressions; equal ones have one."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.lines: list[Instruction] = []
        self._numbers = numbers
        self._known: dict[Expr, int] = {}

    def number(self, expr: Expr) -> int:
        for node in walk(expr):
            if node not in self._known:
                line = self._instruction(node)
                self.lines.append(line)
                self._known[node] = len(self.lines) - 1
        return self._known[expr]

    def _instruction(self, node: Expr) -> Instruction:
        known, dtype = self._known, node.dtype
        if isinstance(node, Const):
            if dtype.is_float:
                return Instruction("const", dtype, value=float(node.value))
            return Instruction("const", dtype, numbers=(int(node.value),))
        if isinstance(node, Slot):
            return Instruction("slot", dtype, numbers=(node.number,))
        if isinstance(node, Iota):
            return Instruction("iota", dtype, numbers=_of_view(node.view))
        if isinstance(node, Call):
            return Instruction("call", dtype, tuple(known[arg] for arg in node.args), node.fn)
        if isinstance(node, Load):
            index = () if node.index is None else (known[node.index],)
            place = (self._numbers[node.ref.tensor], node.index_stride, *_of_view(node.ref.view))
            return Instruction("load", dtype, index, numbers=place)
        if isinstance(node, Checked):
            limits = (node.elements, node.extent, node.otherwise)
            return Instruction("checked", dtype, (known[node.index], known[node.element]), numbers=limits)
        how = node.combination
        args = (*(known[arg] for arg in node.args), *map(self.number, how.values), *map(self.number, how.identity))
        return Instruction("reduce", dtype, args, numbers=(node.extent, node.item))


def _of_view(view: View) -> tuple[int, ...]:
    return (view.offset, *view.shape, *view.strides)


# ---- and back


def is_computable(stages: Sequence[Stage], inputs: int) -> bool:
    """Whether a recipe may have these stages: `inputs` tensors come ahead of them."""
    try:
        check_stages("", stages, inputs)
    except ProgramFormatError:
        return False
    return True


def check_stages(name: str, stages: Sequence[Stage], inputs: int) -> None:
    """Checks the stages of a recipe, as a file may have them, without computing anything.

    Args:
        name: Of the weight, for messages.
        stages: The stages.
        inputs: How many tensors the recipe reads.

    Raises:
        ProgramFormatError: They are none that a compiler wrote.
    """
    if not 0 < len(stages) <= _MOST_STAGES:
        raise _damaged(name, f"{len(stages)} stages, expected at most {_MOST_STAGES}")
    if sum(prod(stage.shape) for stage in stages) > _MOST_IN_ALL:
        raise _damaged(name, f"stages of more than {_MOST_IN_ALL} elements in all")
    for place, stage in enumerate(stages, inputs):
        try:
            _ = _literal(stage) if not stage.code else _expression(stage, place)
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            raise _damaged(name, f"a stage that cannot be computed ({error})") from error


def run_stages(name: str, stages: Sequence[Stage], arrays: Sequence[Array]) -> Array:
    """The last tensor of a recipe.

    Args:
        name: Of the weight, for messages.
        stages: As a file may have them.
        arrays: What the recipe reads.

    Raises:
        ProgramFormatError: The stages are none that a compiler wrote.
        WeightError: A tensor of indices has one beyond the tensor that it indexes.
    """
    check_stages(name, stages, len(arrays))
    tensors = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    try:
        with np.errstate(all="ignore"):  # as on a device: what is too large becomes infinite
            for stage in stages:
                tensors.append(_made(stage, tensors))
    except IndexFault as fault:
        raise WeightError(
            f"'{name}': given the index {fault.value} in a tensor of the weight file, expected one of its dimension"
        ) from None
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise _damaged(name, f"stages that cannot be computed ({error})") from error
    return tensors[-1].reshape(stages[-1].shape)


def _made(stage: Stage, tensors: Sequence[Array]) -> Array:
    """The elements of a stage, row-major."""
    if not stage.code:
        return _literal(stage)
    value = evaluate(_expression(stage, len(tensors)), stage.shape or (1,), tensors.__getitem__)
    return np.array(value, stage.dtype.numpy).reshape(-1)


def _damaged(name: str, what: str) -> ProgramFormatError:
    return ProgramFormatError(f"weight '{name}': {what}; the file is damaged, compile the model again")


def _check_tensor(stage: Stage) -> None:
    if len(stage.shape) > _MOST_RANK or min(stage.shape, default=0) < 0 or stage.dtype.coding is not None:
        raise ValueError(f"given {stage.dtype}{list(stage.shape)}")


def _literal(stage: Stage) -> Array:
    """The elements of a constant."""
    _check_tensor(stage)
    if len(stage.data) != prod(stage.shape) * stage.dtype.size:
        raise ValueError(f"{len(stage.data)} bytes for {stage.dtype}{list(stage.shape)}")
    return np.frombuffer(stage.data, stage.dtype.numpy)


def _expression(stage: Stage, tensors: int) -> Expr:
    """A stage's instructions as an expression over the `tensors` ahead of it, checked."""
    _check_tensor(stage)
    if not 0 < len(stage.code) <= _MOST_INSTRUCTIONS:
        raise ValueError(f"{len(stage.code)} instructions, expected at most {_MOST_INSTRUCTIONS}")
    made: list[Expr] = []
    for line in stage.code:
        if not all(0 <= arg < len(made) for arg in line.args) or line.dtype.coding is not None:
            raise ValueError(f"the operands {list(line.args)} of instruction {len(made)}")
        if line.kind not in _READERS:
            raise ValueError(f"unknown instruction '{line.kind:.40}'")
        made.append(_READERS[line.kind](line, [made[arg] for arg in line.args], tensors))
    parts = walk(made[-1])
    if any(isinstance(node, Slot) for node in parts):
        raise ValueError("a number of a reduction's state outside of it")
    *outer, last = stage.shape or (1,)
    elements = prod(outer) * max([last, *(node.extent for node in parts if isinstance(node, Reduce))])
    if elements > MOST_ELEMENTS or elements * len(parts) > _MOST_WORK:
        raise ValueError(f"{len(parts)} instructions for {elements} elements of {list(stage.shape)}, which is too much")
    return made[-1]


def _view(numbers: Sequence[int]) -> View:
    offset, *rest = numbers
    rank = len(rest) // 2
    shape, strides = tuple(rest[:rank]), tuple(rest[rank:])
    if len(shape) != len(strides) or rank > _MOST_RANK or min(shape, default=0) < 0:
        raise ValueError(f"the view {list(numbers)[:8]}")
    if any(abs(number) > _MOST_STRIDE for number in numbers):
        raise ValueError(f"the view {list(numbers)[:8]} beyond any tensor")
    return View(shape, strides, offset)


def _const(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    if line.dtype.is_float:
        return Const(line.value, line.dtype)
    (number,) = line.numbers
    return Const(bool(number) if not line.dtype.is_integer else number, line.dtype)


def _load(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    tensor, stride, *place = line.numbers
    if not 0 <= tensor < count or len(args) > 1 or abs(stride) > _MOST_STRIDE:
        raise ValueError(f"a read of tensor {tensor} of {count}")
    if args and not (args[0].dtype.is_integer or isinstance(args[0], Checked)):
        raise ValueError("an index that is no integer")
    return Load(Ref(tensor, _view(place)), line.dtype, args[0] if args else None, stride)


def _call(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    if line.fn != "cast" and line.fn not in FUNCTIONS:
        raise ValueError(f"unknown function '{line.fn:.40}'")
    if len(args) != _operands(line.fn):
        raise ValueError(f"'{line.fn}' of {len(args)} operands")
    return Call(line.fn, tuple(args), line.dtype)


@cache
def _operands(fn: str) -> int:
    """How many operands a function takes."""
    return 1 if fn == "cast" else sum(f"{{{number}}}" in FUNCTIONS[fn].text for number in range(3))


def _reduce(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    extent, item = line.numbers
    width, rest = divmod(len(args), 3)
    elements, values, identity = args[:width], args[width : 2 * width], args[2 * width :]
    consts = tuple(const for const in identity if isinstance(const, Const))
    slots = {node.number for value in values for node in walk(value) if isinstance(node, Slot)}
    closed = all(not isinstance(node, Load | Reduce | Iota | Checked) for value in values for node in walk(value))
    fits = width > 0 and not rest and len(consts) == width and 0 <= item < width and 0 <= extent <= MOST_ELEMENTS
    if not (fits and closed and slots <= set(range(2 * width))):
        raise ValueError(f"a reduction of {len(args)} operands")
    state = tuple(Slot(number, element.dtype) for number, element in enumerate((*elements, *elements)))
    return Reduce(Combination("state", state, consts, tuple(values)), tuple(elements), extent, line.dtype, item)


def _checked(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    (index, element), (elements, extent, otherwise) = args, line.numbers
    if extent < 0 or elements < 0 or otherwise not in (0, -1):
        raise ValueError(f"a check of {elements} indices below {extent}")
    return Checked(index, element, elements, extent, otherwise, 0, line.dtype)


def _iota(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    return Iota(_view(line.numbers), line.dtype)


def _slot(line: Instruction, args: Sequence[Expr], count: int) -> Expr:
    (number,) = line.numbers
    return Slot(number, line.dtype)


_READERS: Mapping[str, Callable[[Instruction, Sequence[Expr], int], Expr]] = {
    "const": _const,
    "load": _load,
    "iota": _iota,
    "call": _call,
    "reduce": _reduce,
    "checked": _checked,
    "slot": _slot,
}
