"""Reductions, each said once: what an element contributes, how two contributions become one, what they give in the end.

A reduction's definition is an equation over symbols, like an op's. Kernels take it from there: a thread combines the
elements that it reads, then lanes exchange their states, then groups of lanes. What is combined may be one number, as
of a sum, or several, as the highest number and its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from npu_compiler.dtypes import BOOL, INT64, DType
from npu_compiler.tensor.expr import Combination, Const, Reduce, Slot
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, Trace, arange, refuse_codes

__all__ = ["Reduction", "State", "highest", "lowest", "reduce", "reduction", "scan"]

State = tuple[Tensor, ...]
"""The numbers of a state: scalars in an equation, and one for each row where they are lifted or finished."""

Identity = Number | Callable[[DType], Number]


def _itself(element: Tensor, position: Tensor) -> State:
    return (element,)


def _all_numbers(*state: Tensor) -> State:
    return state


@dataclass(frozen=True, eq=False)
class Reduction:
    """How the elements of a row become a value.

    Attributes:
        name: What it is called in kernels and messages.
        combine: The state of two states: takes the numbers of both and gives as many. It must be associative and
            commutative, but for rounding.
        identity: For each number what changes nothing, or how the data type gives that.
        lift: The state of one element, by the element [..., n] and its position [n] along the row, int64.
        finish: The results, by the numbers of the state of all elements, each [..., 1].
        needs_elements: Whether there is no result without elements.
    """

    name: str
    combine: Callable[[State, State], State]
    identity: tuple[Identity, ...]
    lift: Callable[[Tensor, Tensor], State] = _itself
    finish: Callable[..., State] = _all_numbers
    needs_elements: bool = False
    _traced: dict[tuple[DType, ...], Combination] = field(default_factory=dict, repr=False)

    def combination(self, dtypes: tuple[DType, ...], trace: Trace) -> Combination:
        """The equation as expressions, for states of these data types."""
        if dtypes not in self._traced:
            slots = tuple(Slot(number, dtype) for number, dtype in enumerate(dtypes * 2))
            symbols = tuple(Tensor(trace, (), slot.dtype, slot) for slot in slots)
            both = self.combine(symbols[: len(dtypes)], symbols[len(dtypes) :])
            values = tuple(value.cast(dtype).expr for value, dtype in zip(both, dtypes, strict=True))
            given = zip(self.identity, dtypes, strict=True)
            identity = tuple(Const(i(dtype) if callable(i) else i, dtype) for i, dtype in given)
            self._traced[dtypes] = Combination(self.name, slots, identity, values)
        return self._traced[dtypes]


def reduction(
    *identity: Identity,
    lift: Callable[[Tensor, Tensor], State] = _itself,
    finish: Callable[..., State] = _all_numbers,
    needs_elements: bool = False,
) -> Callable[[Callable[..., Tensor | State]], Reduction]:
    """Makes a reduction of the equation by which two states become one; the arguments are those of `Reduction`.

    The equation takes two tensors where a state is one number, else two tuples of them, and gives the like.
    """

    def define(equation: Callable[..., Tensor | State]) -> Reduction:
        def combine(a: State, b: State) -> State:
            both = equation(a[0], b[0]) if len(identity) == 1 else equation(a, b)
            return (both,) if isinstance(both, Tensor) else both

        return Reduction(equation.__name__, combine, identity, lift, finish, needs_elements)

    return define


def lowest(dtype: DType) -> Number:
    """A number that none of a data type is below."""
    return -highest(dtype) if dtype.is_float else -highest(dtype) - 1


def highest(dtype: DType) -> Number:
    """A number that none of a data type is above.

    Raises:
        OpRefusal: Of booleans, which have no order in PyTorch's reductions.
    """
    if dtype == BOOL:
        raise OpRefusal(f"an extremum of {dtype} is not supported")
    return float("inf") if dtype.is_float else (1 << (63 if dtype.size == 8 else 31)) - 1  # as wide as registers


def reduce(
    x: Tensor,
    reduction: Reduction,
    dims: Sequence[int],
    keepdim: bool,
    dtype: DType | None = None,
    scale: float | None = None,
) -> State:
    """A tensor reduced over `dims`, all of them when `dims` is empty.

    Args:
        x: Any shape.
        reduction: What becomes of its elements; those of several dimensions come in row-major order.
        dims: Dimensions to reduce.
        keepdim: Whether they stay, with size 1.
        dtype: Data type to which elements are converted before.
        scale: What each element is multiplied by before, in registers: never stored in half precision.

    Returns:
        What `reduction` finishes with, one or several tensors.

    Raises:
        OpRefusal: There are no elements, and no result without them.
    """
    refuse_codes(x)
    rank = len(x.shape)
    reduced = sorted({normalize_dim(d, rank) for d in dims} if rank else ()) or list(range(rank))
    kept = [d for d in range(rank) if d not in reduced]
    extent = prod(x.shape[d] for d in reduced)
    if reduction.needs_elements and extent == 0:
        raise OpRefusal(f"{reduction.name} of no elements (dims {list(dims)} of {list(x.shape)}) does not exist")
    outer = tuple(x.shape[d] for d in kept)
    flat = x.permute([*kept, *reduced]).reshape((*outer, extent))
    element = flat.cast(dtype or x.dtype)
    state = reduction.lift(element if scale is None else element * scale, arange(x.trace, extent))
    dtypes = tuple(number.dtype for number in state)
    combination, args = reduction.combination(dtypes, x.trace), tuple(number.expr for number in state)
    numbers = [
        Tensor(x.trace, (*outer, 1), number, Reduce(combination, args, extent, number, item))
        for item, number in enumerate(dtypes)
    ]
    final = tuple(1 if d in reduced else x.shape[d] for d in range(rank)) if keepdim else outer
    results = reduction.finish(*numbers)
    return tuple(r if final == r.shape else r.realize().reshape(final) for r in results)


def scan(x: Tensor, reduction: Reduction, dim: int, dtype: DType | None = None, item: int = 0) -> Tensor:
    """What a reduction gives for each element with all ahead of it along `dim`.

    Args:
        x: Any shape.
        reduction: What becomes of the elements.
        dim: The dimension.
        dtype: Data type to which elements are converted before.
        item: Which of the tensors that `reduction` finishes with.

    Returns:
        A tensor of the shape of `x`.
    """
    refuse_codes(x)
    dim = normalize_dim(dim, len(x.shape))
    length = x.shape[dim] if x.shape else 1
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    element, position = (Tensor(x.trace, (), slot.dtype, slot) for slot in (Slot(0, x.dtype), Slot(1, INT64)))
    state = reduction.lift(element.cast(dtype or x.dtype), position)
    dtypes = tuple(number.dtype for number in state)
    combination = reduction.combination(dtypes, x.trace)
    numbers = (Tensor(x.trace, (), slot.dtype, slot) for slot in combination.slots[: len(dtypes)])
    value = reduction.finish(*numbers)[item]
    result = x.trace.anchor(
        "scan",
        (x.reshape((outer, length, inner)),),
        (outer, length, inner),
        value.dtype,
        combination=combination,
        lift=tuple(number.expr for number in state),
        value=value.expr,
    )
    return result.reshape(x.shape)
