"""Scalar expressions: what one element of a tensor is, as a function of its position.

A fused kernel is nothing but such an expression over one iteration space. numpy evaluates it, and each target's dialect
prints it; `FUNCTIONS` is the one table of what an expression may call. Equal expressions are one object: comparing
them, and looking them up, goes by identity: what is used in several places is one node, and no walk takes it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_compiler.dtypes import DType
from npu_compiler.tensor.interning import Interned
from npu_compiler.tensor.view import Step, View

__all__ = ["FUNCTIONS", "Call", "Checked", "Combination", "Const", "Expr", "Function", "Iota", "Load", "Reduce", "Ref"]
__all__ += ["Slot"]
__all__ += ["children", "has_reduce", "leaves", "moves", "reindex", "reductions", "substitute", "varies", "walk"]


class _Node(Interned):
    """What expressions are made of."""

    __slots__ = ("below", "loads")

    below: tuple[Expr, ...]
    """What `walk` found below it, once it was asked."""

    loads: tuple[Load, ...]
    """What `leaves` found, likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class Const(_Node):
    """A number. That 1, 1.0 and True are equal in Python, and -0.0 is 0.0, does not make them one."""

    value: float | int | bool
    dtype: DType

    @staticmethod
    def key(value: float | int | bool, dtype: DType) -> tuple[Any, ...]:
        return type(value), repr(value), dtype


@dataclass(frozen=True, slots=True, eq=False)
class Ref(Interned):
    """A tensor read through a view.

    Attributes:
        tensor: Index of the tensor in the trace.
        view: Where its elements lie, resolved against the tensor's layout.
        steps: The view operations that led there, so that they can be replayed on what the tensor is made of.
    """

    tensor: int
    view: View
    steps: tuple[Step, ...] = ()

    def apply(self, step: Step) -> Ref | None:
        """The reference after one more view operation; None where strides can't say it."""
        view = self.view.apply(step)
        return None if view is None else Ref(self.tensor, view, (*self.steps, step))


@dataclass(frozen=True, slots=True, eq=False)
class Load(_Node):
    """An element of a tensor at the current position; with an index, `index * index_stride` elements further on."""

    ref: Ref
    dtype: DType
    index: Expr | None = None
    index_stride: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Iota(_Node):
    """The current position itself: ``offset + i0*strides[0] + ...`` of `view`."""

    view: View
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Call(_Node):
    """A function of `FUNCTIONS`, or ``cast`` to `dtype`."""

    fn: str
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Slot(_Node):
    """A number of the states that a `Combination` combines."""

    number: int
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Combination(Interned):
    """How two states of a row become one; a state is a few numbers that say all that is wanted of some elements.

    It is associative and commutative, but for rounding, so that threads may share a row in any way.

    Attributes:
        name: What it is called in kernels.
        slots: The numbers of one state, then those of the other.
        identity: Each number of the state that changes no other, the state of no elements.
        values: Each number of the state of both, over `slots`.
    """

    name: str
    slots: tuple[Slot, ...]
    identity: tuple[Const, ...]
    values: tuple[Expr, ...]

    @property
    def function(self) -> str | None:
        """The function of `FUNCTIONS` that combines two numbers, where it is just one."""
        call = self.values[0]
        is_one = len(self.values) == 1 and isinstance(call, Call) and call.fn != "cast"
        return call.fn if is_one and isinstance(call, Call) and call.args == self.slots else None


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(_Node):
    """A reduction over the last dimension, which is `extent` long; the result is the same all along it.

    Attributes:
        combination: How elements become one.
        args: Each number of an element's own state.
        extent: How many elements.
        dtype: Of the result.
        item: Which number of the state of all elements it is.
    """

    combination: Combination
    args: tuple[Expr, ...]
    extent: int
    dtype: DType
    item: int = 0

    @property
    def row(self) -> tuple[Combination, tuple[Expr, ...], int]:
        """What is the same for all numbers of one state, which one loop over the row computes."""
        return self.combination, self.args, self.extent


@dataclass(frozen=True, slots=True, eq=False)
class Checked(_Node):
    """An index inside of a dimension: itself from 0 to `extent` - 1; else `otherwise`, and the fault is recorded.

    Attributes:
        index: Of any integer type; all of its bits are compared.
        element: Which of the `elements` of the index tensor it is, for the record.
        extent: Size of the dimension.
        otherwise: 0, which is safe to read, or -1, which tells a scatter to store nothing.
        check: Number of the check, see `Trace.checks`.
        dtype: Data type of the result.
    """

    index: Expr
    element: Expr
    elements: int
    extent: int
    otherwise: int
    check: int
    dtype: DType


Expr = Const | Load | Iota | Call | Reduce | Checked | Slot


@dataclass(frozen=True, slots=True)
class Function:
    """A scalar function: its text in C (operands as ``{0}``, ``{1}``...) and its meaning in numpy."""

    text: str
    numpy: Callable[..., Any]


def _erf(x: Any) -> Any:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


def _whole_quotient(x: Any, y: Any) -> Any:
    down, rest = np.divmod(x, np.where(y == 0, 1, y))
    return down + ((rest != 0) & ((x < 0) != (y < 0)))


# The text is the common subset of Metal's C++ and CUDA's; a dialect overrides what differs there. Functions are written
# so that NaN stays NaN.
FUNCTIONS: dict[str, Function] = {
    "add": Function("({0} + {1})", np.add),
    "sub": Function("({0} - {1})", np.subtract),
    "mul": Function("({0} * {1})", np.multiply),
    "div": Function("({0} / {1})", np.divide),
    "quotient": Function("({0} / {1})", np.divide),  # by a number from one on; a dialect may miss the last place
    "whole_quotient": Function("({0} / {1})", _whole_quotient),  # of integers, towards zero; by neither 0 nor -1
    "neg": Function("(-{0})", np.negative),
    "abs": Function("({0} < 0 ? -{0} : {0})", np.abs),
    "exp": Function("exp({0})", np.exp),
    "short_exp": Function("exp({0})", np.exp),  # of what is rounded to 16 bits at the end; a dialect may be 2^-17 off
    "log": Function("log({0})", np.log),
    "sqrt": Function("sqrt({0})", np.sqrt),
    "rsqrt": Function("rsqrt({0})", lambda x: 1 / np.sqrt(x)),
    "sin": Function("sin({0})", np.sin),
    "cos": Function("cos({0})", np.cos),
    "tanh": Function("tanh({0})", np.tanh),
    "erf": Function("erf({0})", _erf),
    "pow": Function("pow({0}, {1})", np.power),
    "fmod": Function("fmod({0}, {1})", np.fmod),
    "floor": Function("floor({0})", np.floor),
    "ceil": Function("ceil({0})", np.ceil),
    "rint": Function("rint({0})", np.rint),  # to the nearest whole number, from halfway to the even one
    "nearest": Function("rint({0})", np.rint),  # the same of numbers of at most 2^22
    "code": Function("(int(rint({0})) + {1})", lambda x, zero: np.rint(x) + zero),  # of such numbers, an integer
    "saturate": Function("({0} > 0 ? {0} < 1 ? {0} : 1 : 0)", lambda x: np.where(x > 0, np.minimum(x, 1), 0)),
    "max": Function("({0} > {1} || {0} != {0} ? {0} : {1})", np.maximum),
    "min": Function("({0} < {1} || {0} != {0} ? {0} : {1})", np.minimum),
    "eq": Function("({0} == {1})", np.equal),
    "ne": Function("({0} != {1})", np.not_equal),
    "lt": Function("({0} < {1})", np.less),
    "le": Function("({0} <= {1})", np.less_equal),
    "gt": Function("({0} > {1})", np.greater),
    "ge": Function("({0} >= {1})", np.greater_equal),
    "and": Function("({0} & {1})", np.bitwise_and),
    "or": Function("({0} | {1})", np.bitwise_or),
    "xor": Function("({0} ^ {1})", np.bitwise_xor),
    "not": Function("(!{0})", np.logical_not),
    "shl": Function("({0} << {1})", np.left_shift),
    "shr": Function("({0} >> {1})", np.right_shift),
    "bits": Function("bits_of({0})", lambda x: np.asarray(x, np.float32).view(np.int32)),  # of a float32, as int32
    "of_bits": Function("float_of({0})", lambda x: np.asarray(x, np.int32).view(np.float32)),
    "where": Function("({0} ? {1} : {2})", np.where),
}


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions that `expr` is directly made of."""
    if type(expr) is Load:
        return () if expr.index is None else (expr.index,)
    if type(expr) is Call or type(expr) is Reduce:
        return expr.args
    return (expr.index, expr.element) if type(expr) is Checked else ()


def walk(expr: Expr) -> tuple[Expr, ...]:
    """Each distinct sub-expression once, operands before what uses them."""
    try:
        return (*expr.below, expr)  # what is lowered is walked a dozen times in a row
    except AttributeError:
        return _walked(expr)


def _walked(expr: Expr) -> tuple[Expr, ...]:
    """What `walk` gives, which the expression keeps."""
    if not children(expr):
        object.__setattr__(expr, "below", ())
        return (expr,)
    found: dict[Expr, None] = {}
    stack = [expr]
    while stack:
        node = stack[-1]
        if hasattr(node, "below"):  # a part that was walked by itself: the same order, less what came before
            found.update(dict.fromkeys(node.below))
            missing = []
        else:
            missing = [child for child in children(node) if child not in found]
        if missing:
            stack.extend(reversed(missing))
        else:
            found[stack.pop()] = None
    order = tuple(found)
    object.__setattr__(expr, "below", order[:-1])
    return order


def moves(leaf: Load | Iota, shape: tuple[int, ...], dims: Collection[int]) -> bool:
    """Whether a leaf of an expression over `shape` is something else from one position of some dimensions to the next.

    The index of a load is left aside.
    """
    strides = (leaf.ref.view if isinstance(leaf, Load) else leaf.view).expand(shape).strides
    return any(strides[dim] and shape[dim] > 1 for dim in dims)


def varies(expr: Expr, shape: tuple[int, ...], dims: Collection[int]) -> bool:
    """Whether any leaf of an expression over `shape` moves along some dimensions."""
    return any(moves(node, shape, dims) for node in walk(expr) if isinstance(node, Load | Iota))


def leaves(expr: Expr) -> tuple[Load, ...]:
    """The distinct loads of `expr`, those inside an index included."""
    if type(expr) is Load:  # one that held itself would be freed late
        return (expr,) if expr.index is None else (*leaves(expr.index), expr)
    try:
        return expr.loads
    except AttributeError:
        object.__setattr__(expr, "loads", tuple([node for node in walk(expr) if type(node) is Load]))
        return expr.loads


def reductions(expr: Expr) -> list[Reduce]:
    """The distinct reductions of `expr`, each after those it depends on."""
    return [node for node in walk(expr) if isinstance(node, Reduce)]


def has_reduce(expr: Expr) -> bool:
    """Whether `expr` reduces over its last dimension."""
    return any(isinstance(node, Reduce) for node in walk(expr))


def substitute(expr: Expr, rewrite: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuilds `expr` bottom-up; where `rewrite` gives an expression for a leaf or a rebuilt node, that one stands."""
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        rebuilt = _with_children(node, done)
        result = rewrite(rebuilt)
        done[node] = rebuilt if result is None else result
    return done[expr]


def _with_children(node: Expr, done: Mapping[Expr, Expr]) -> Expr:
    """A node whose operands are those that `done` has in place of its own."""
    if type(node) is Load:
        return node if node.index is None else Load(node.ref, node.dtype, done[node.index], node.index_stride)
    if type(node) is Call:
        args = tuple([done[arg] for arg in node.args])
        return node if args == node.args else Call(node.fn, args, node.dtype)
    if type(node) is Reduce:
        args = tuple([done[arg] for arg in node.args])
        return node if args == node.args else replace(node, args=args)
    if type(node) is Checked:
        return replace(node, index=done[node.index], element=done[node.element])
    return node


class _Inexpressible(Exception):
    """A view operation that strides cannot say."""


def reindex(expr: Expr, shape: tuple[int, ...], steps: tuple[Step, ...]) -> Expr | None:
    """`expr`, which has `shape`, seen through view operations: they are applied to each of its leaves.

    Returns:
        The expression over the new shape, or None where `expr` reduces or strides cannot say it.
    """
    if not steps:
        return expr

    def rewrite(node: Expr) -> Expr | None:
        if isinstance(node, Reduce):
            raise _Inexpressible
        if isinstance(node, Iota):
            view: View | None = node.view.expand(shape)
            for step in steps:
                view = view.apply(step) if view is not None else None
            if view is None:
                raise _Inexpressible
            return Iota(view, node.dtype)
        if isinstance(node, Load):
            expanded = ("expand", shape)
            ref: Ref | None = node.ref if node.ref.view.shape == shape else node.ref.apply(expanded)
            for step in steps:
                ref = ref.apply(step) if ref is not None else None
            if ref is None:
                raise _Inexpressible
            return Load(ref, node.dtype, node.index, node.index_stride)
        return None

    try:
        return substitute(expr, rewrite)
    except _Inexpressible:
        return None
