"""Symbolic tensors: an op's definition, called with them, gives shapes, data types and arithmetic at once.

What has to be in memory they ask of their `Trace`, which collects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, INT64, DType, promote
from npu_compiler.tensor.coded import decoded, encoded
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Iota, Load, Ref, reindex
from npu_compiler.tensor.index_check import IndexCheck
from npu_compiler.tensor.intervals import Interval, interval
from npu_compiler.tensor.layout import Layout, dense
from npu_compiler.tensor.shapes import OpRefusal, broadcast_shapes, normalize_dim
from npu_compiler.tensor.trace import Anchor, LayoutRule, Map, Scatter, Source, TracedTensor, role_of
from npu_compiler.tensor.view import Step, View
from npu_compiler.tensor.viewable import Viewable

__all__ = ["Number", "OpRefusal", "Tensor", "Trace", "apply", "arange", "combined", "full", "refuse_codes", "where"]

Number = float | int | bool
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


class Tensor(Viewable):
    """A tensor of a trace: either a reference to one in memory, or an expression not yet stored anywhere.

    Arithmetic broadcasts and promotes as PyTorch does. View methods make no copy unless strides cannot say the result.
    """

    __slots__ = ("dtype", "ref", "shape", "source", "trace")

    def __init__(self, trace: Trace, shape: tuple[int, ...], dtype: DType, source: Ref | Expr) -> None:
        self.trace, self.shape, self.dtype, self.source = trace, shape, dtype, source
        self.ref = source if isinstance(source, Ref) else None

    @property
    def expr(self) -> Expr:
        """What each element is."""
        source = self.source
        return Load(source, self.dtype.stored) if isinstance(source, Ref) else source

    def realize(self) -> Tensor:
        """This tensor in memory: itself where it is, else a new tensor of the trace that holds it."""
        return self if self.ref is not None else self.trace.map(self)

    def placed(self) -> Ref:
        """Where it lies in memory, when it is there."""
        ref = self.realize().ref
        assert ref is not None
        return ref

    def with_expr(self, expr: Expr, dtype: DType | None = None) -> Tensor:
        return Tensor(self.trace, self.shape, dtype or self.dtype, expr)

    def _over(self, shape: tuple[int, ...], source: Ref | Expr) -> Tensor:
        return Tensor(self.trace, shape, self.dtype, source)

    def _view(self, shape: tuple[int, ...], step: Step) -> Tensor:
        if self.ref is None:
            expr = reindex(self.expr, self.shape, (step,))
            if expr is not None:
                return self._over(shape, expr)
            return self.trace.map(self, role="plain")._view(shape, step)
        ref = self.ref.apply(step)
        if ref is None:  # an image's padded channels, say, do not flatten; a plain tensor's dimensions do
            return self.trace.map(self, role="plain")._view(shape, step)
        return self._over(shape, ref)

    def cast(self, dtype: DType) -> Tensor:
        """The values in another data type. Between floating-point types nothing happens until a store."""
        if dtype == self.dtype:
            return self
        if self.dtype.coding is not None:
            return self.with_expr(decoded(self.expr, self.dtype), FLOAT32).cast(dtype)
        if dtype.coding is not None:
            return self.with_expr(encoded(self.cast(FLOAT32).expr, dtype), dtype)
        kept = dtype.is_float and self.dtype.is_float and self.ref is None
        return self.with_expr(self.expr if kept else Call("cast", (self.expr,), dtype), dtype)

    def within(self, extent: int, *, wraps: bool = False, otherwise: int = 0) -> Tensor:
        """These integers as positions of a dimension, int64: a kernel checks those that might lie outside of it.

        Args:
            extent: Size of the dimension.
            wraps: Whether numbers from -`extent` on count from the end.
            otherwise: What stands for a position that there is none of, see `expr.Checked`.

        Raises:
            OpRefusal: There are indices, but no position.
        """
        count = prod(self.shape)
        if count and extent == 0:
            raise OpRefusal(f"given indices {list(self.shape)} into a dimension of no elements")
        positions = self.cast(INT64)
        low, high = interval(self.expr, self.trace.bounds) or (0, 0)
        if wraps and low < 0:
            positions = where(positions < 0, positions + extent, positions)
        if not count or ((-extent if wraps else 0) <= low and high < extent):
            return positions
        element = Iota(View(self.shape, dense(self.shape).strides), INT64)
        check = self.trace.check(self, extent, wraps)
        return positions.with_expr(Checked(positions.expr, element, count, extent, otherwise, check, INT64))

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """``result[..., i..., ...] = self[..., index[i...], ...]``: `dim` is replaced by the dimensions of `index`.

        Indices are checked, see `within`.
        """
        dim = normalize_dim(dim, len(self.shape))
        positions = index.within(self.shape[dim])
        rest = (*self.shape[:dim], *(1,) * len(index.shape), *self.shape[dim + 1 :])
        return self.pick({dim: positions.reshape((*index.shape, *(1,) * (len(self.shape) - dim - 1)))}, rest)

    def pick(self, places: Mapping[int, Tensor], rest: Sequence[int] | None = None) -> Tensor:
        """The elements at positions of some dimensions, which are read where they lie; other dimensions are walked.

        Args:
            places: By dimension, counted from the front: positions inside of it (`within`), which broadcast with
                `rest`.
            rest: The shape under which this tensor, of size 1 along these dimensions, is read; as it is when omitted.
        """
        rows = self.realize()
        ref = rows.placed()
        strides = ref.view.strides
        for dim in places:
            rows = rows.slice(dim, 0, 1)
        rows = rows if rest is None else rows.reshape(rest)
        sizes = broadcast_shapes(rows.shape, *(place.shape for place in places.values()))
        rows = rows.expand(sizes)
        if rows.ref is None or rows.ref.tensor != ref.tensor:
            raise OpRefusal("the rows to gather do not lie at a constant distance")
        index, stride = combined({dim: strides[dim] for dim in places}, places)
        return self._over(sizes, Load(rows.ref, self.dtype.stored, index.expand(sizes).expr, stride))

    def at(self, places: Mapping[int, Tensor]) -> Tensor:
        """``result[..., i, ...] = self[..., places[dim][..., i, ...], ...]``: elements at computed positions.

        Args:
            places: Integers by dimension, over the result's shape or what broadcasts to it; of a dimension without any,
                each position is its own. They are checked where their bounds prove nothing, see `within`.
        """
        return self.pick({dim: place.within(self.shape[dim]) for dim, place in places.items()}) if places else self

    def __add__(self, other: Tensor | Number) -> Tensor:
        return apply("add", self, other)

    def __radd__(self, other: Number) -> Tensor:
        return apply("add", other, self)

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return apply("sub", self, other)

    def __rsub__(self, other: Number) -> Tensor:
        return apply("sub", other, self)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return apply("mul", self, other)

    def __rmul__(self, other: Number) -> Tensor:
        return apply("mul", other, self)

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return apply("div", _floating(self), other)

    def __rtruediv__(self, other: Number) -> Tensor:
        return apply("div", other, _floating(self))

    def __neg__(self) -> Tensor:
        return apply("neg", self)

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return apply("lt", self, other)

    def __le__(self, other: Tensor | Number) -> Tensor:
        return apply("le", self, other)

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return apply("gt", self, other)

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return apply("ge", self, other)


class Trace:
    """Collects what tracing makes.

    Attributes:
        tensors: In order of computation.
        checks: The indices that kernels check; `expr.Checked` has a number in this list.
        bounds: Of tensors of integers that are computed, by their index.
        node: Name of the node whose definition is called.
        names: The names that the graph has for the tensors it is called with.
    """

    def __init__(self, layouts: LayoutRule) -> None:
        self.layouts = layouts
        self.tensors: list[TracedTensor] = []
        self.checks: list[IndexCheck] = []
        self.bounds: dict[int, Interval] = {}
        self.node = ""
        self.names: dict[Tensor, str] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None = None) -> Tensor:
        """Declares a tensor in memory and gives the symbolic tensor that refers to it."""
        return self._declare(name, shape, dtype, role, source, self.layouts.layout(shape, role))

    def _declare(
        self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None, layout: Layout
    ) -> Tensor:
        traced = TracedTensor(len(self.tensors), name, shape, dtype.stored, layout, role, source)
        self.tensors.append(traced)
        bounds = interval(source.expr, self.bounds) if isinstance(source, Map) and not dtype.is_float else None
        if bounds is not None:
            self.bounds[traced.index] = bounds
        return Tensor(self, shape, dtype, Ref(traced.index, traced.view))

    def check(self, index: Tensor, extent: int, wraps: bool) -> int:
        """The number of a check of `index`, see `IndexCheck`."""
        name = self.names.get(index, self.node)
        self.checks.append(IndexCheck(name, index.shape, self.node, extent, wraps))
        return len(self.checks) - 1

    def map(self, tensor: Tensor, role: str | None = None, order: tuple[int, ...] = ()) -> Tensor:
        """Stores an expression, or a copy of a view. Images stay images unless `role` says otherwise.

        Args:
            tensor: What to store.
            role: See `LayoutRule`.
            order: Where given: the dimensions from outermost to innermost, as they lie on every target.
        """
        if order:
            layout = Layout(tensor.shape, tensor.shape, order)
            return self._declare(self.node, tensor.shape, tensor.dtype, "plain", Map(tensor.expr), layout)
        return self.add(
            self.node,
            tensor.shape,
            tensor.dtype,
            role or role_of(tensor.expr, tensor.shape, self.tensors),
            Map(tensor.expr),
        )

    def anchor(
        self,
        kind: str,
        operands: tuple[Tensor, ...],
        shape: tuple[int, ...],
        dtype: DType,
        role: str = "plain",
        **attrs: Any,
    ) -> Tensor:
        """Adds an anchor whose operands are brought into memory first.

        Args:
            kind: What it computes: the `kind` of a problem.
            operands: What it reads.
            shape, dtype: Of the result.
            role: That of the result; see `LayoutRule`.
            attrs: Its parameters, for the problem.
        """
        for operand in operands:
            refuse_codes(operand)
        source = Anchor(kind, tuple(operand.placed() for operand in operands), attrs)
        if kind == "attention":  # [B, H, S, D] as [B, S, H, D], which the projection after it reads as rows
            return self._declare(self.node, shape, dtype, "plain", source, Layout(shape, shape, (0, 2, 1, 3)))
        return self.add(self.node, shape, dtype, role, source)

    def scatter(
        self, into: Tensor, places: Mapping[int, Tensor], values: Tensor, walks: Sequence[int] | None = None
    ) -> Tensor:
        """`into` with `values` at the positions `places`; of several values for one place any one wins.

        Args:
            into: Any shape.
            places: By dimension of `into`, counted from the front: where along it each value goes, integers that
                broadcast to the shape of `values` and are checked, see `Tensor.within`; -1 stands for nowhere.
            values: Any shape.
            walks: For each dimension of `values` the dimension of `into` that it walks from 0 on, or -1; when omitted,
                the one of the same number where `places` has it not.
        """
        base = into.placed()
        if not base.view.same_elements(self.tensors[base.tensor].view):
            base = self.map(into).placed()
        role = self.tensors[base.tensor].role
        strides = self.layouts.layout(into.shape, role).strides
        if walks is None:
            walks = [-1 if dim in places else dim for dim in range(len(into.shape))]
        view = View(values.shape, tuple(0 if dim < 0 else strides[dim] for dim in walks))
        index, stride = combined({dim: strides[dim] for dim in places}, places, nowhere=True)
        source = Scatter(base, values.cast(into.dtype).expr, values.shape, view, index.expr, stride)
        return self.add(self.node, into.shape, into.dtype, role, source)


def refuse_codes(tensor: Tensor) -> None:
    """Raises OpRefusal for a tensor of a type that is only stored, with which nothing is computed."""
    if tensor.dtype.coding is not None:
        raise OpRefusal(f"given a tensor of {tensor.dtype}, which is only stored; convert it with .to(dtype) first")


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.is_float else tensor.cast(FLOAT32)


def _result_dtype(operands: Sequence[Tensor | Number]) -> DType:
    """PyTorch's promotion: a Python number counts only where its category is above that of every tensor."""
    tensors = [operand.dtype for operand in operands if isinstance(operand, Tensor)]
    result = tensors[0]
    for dtype in tensors[1:]:
        result = promote(result, dtype)
    for operand in operands:
        if isinstance(operand, float) and not result.is_float:
            result = FLOAT32
        elif isinstance(operand, int) and not isinstance(operand, bool) and result == BOOL:
            result = INT64
    return result


def apply(fn: str, *operands: Tensor | Number) -> Tensor:
    """Calls a function of the expression table on broadcast operands, promoted to one data type.

    For ``where`` the condition is left out of the promotion; comparisons give booleans.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    first = tensors[0]
    for tensor in tensors if fn != "where" or len({tensor.dtype for tensor in tensors[1:]}) > 1 else ():
        refuse_codes(tensor)
    shape = broadcast_shapes(*(tensor.shape for tensor in tensors))
    promoted = operands[1:] if fn == "where" else operands
    dtype = _result_dtype([*promoted] if any(isinstance(p, Tensor) for p in promoted) else [first, *promoted])
    args = []
    for position, operand in enumerate(operands):
        if fn == "where" and position == 0:
            condition = operand if isinstance(operand, Tensor) else full(first.trace, (), bool(operand), BOOL)
            args.append(condition.cast(BOOL).expr)
        elif isinstance(operand, Tensor):
            args.append(operand.cast(dtype).expr)
        else:
            args.append(full(first.trace, (), operand, dtype).expr)
    result = BOOL if fn in _COMPARISONS or fn == "not" else dtype
    return Tensor(first.trace, shape, result, Call(fn, tuple(args), result.stored))


_INT64_LIMIT = 1 << 63


def _constant(value: object, dtype: DType) -> Const:
    """A number that an attribute gave.

    Raises:
        OpRefusal: It is no number, or one that `dtype` does not hold.
    """
    if not isinstance(value, bool | int | float):
        raise OpRefusal(f"given {value!r:.40}, expected a number")
    if not dtype.is_float and not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise OpRefusal(f"given {value}, expected a number that {dtype} holds")
    return Const(value, dtype)


def combined(strides: Mapping[int, int], places: Mapping[int, Tensor], nowhere: bool = False) -> tuple[Tensor, int]:
    """Positions along several dimensions as one number, and the elements from one number to the next.

    Args:
        strides: Of each dimension, in elements.
        places: By dimension the positions along it, int64.
        nowhere: Whether they may be -1, so that the number is to be negative as well.
    """
    if len(places) == 1:
        ((dim, place),) = places.items()
        return place, strides[dim]
    unit = gcd(*strides.values()) or 1
    total: Tensor | None = None
    missing: Tensor | None = None
    for dim, place in places.items():
        part = place if strides[dim] == unit else place * (strides[dim] // unit)
        total = part if total is None else total + part
        if nowhere and (interval(place.expr, place.trace.bounds) or (0, 0))[0] < 0:
            missing = place < 0 if missing is None else apply("or", missing, place < 0)
    assert total is not None
    return total if missing is None else where(missing, -1, total), unit


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """``a`` where the condition holds, else ``b``; the side not taken is not read."""
    return apply("where", condition, a, b)


def full(trace: Trace, shape: tuple[int, ...], value: Number, dtype: DType) -> Tensor:
    """A tensor of one value."""
    if dtype.coding is not None:
        return full(trace, shape, value, FLOAT32).cast(dtype)
    return Tensor(trace, shape, dtype, _constant(value, dtype))


def arange(trace: Trace, length: int) -> Tensor:
    """0, 1, ... `length` - 1 as int64."""
    return Tensor(trace, (length,), INT64, Iota(View((length,), (1,)), INT64))
