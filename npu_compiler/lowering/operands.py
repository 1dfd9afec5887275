"""The operands of a generated kernel: one iteration space, a pointer for each tensor, a stride for each dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from npu_compiler.artifact.plan import FAULTS, Argument
from npu_compiler.dtypes import DType
from npu_compiler.lowering.dialect import LeafNames
from npu_compiler.lowering.params import CheckNumber
from npu_compiler.tensor.expr import Checked, Expr, Iota, Load, Reduce, walk
from npu_compiler.tensor.intervals import interval, view_bounds
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View, collapse

__all__ = ["MAX_ELEMENTS", "Merge", "Operands", "Pointer", "Walks", "check_size", "merge_groups", "merge_rows"]

MAX_ELEMENTS = 1 << 31

Merged = tuple[tuple[int, ...], list[tuple[int, ...]]]
Merge = Callable[[tuple[int, ...], list[tuple[int, ...]]], Merged]
"""Merges dimensions of an iteration space, given the strides of every operand over it."""

Leaf = Load | Iota

Walks = Mapping[Leaf | None, tuple[int, ...]]
"""For each leaf, and under None for the output: its stride along each dimension of an iteration space."""


class Pointer(NamedTuple):
    """What a kernel binds for an expression: a tensor's memory; without a data type, the record of faults."""

    argument: Argument
    dtype: DType | None


@dataclass(frozen=True)
class Operands:
    """The leaves of some expressions over an iteration space, resolved to pointers, addresses and parameters.

    Attributes:
        sizes: The iteration space after merging dimensions, outermost first.
        pointers: What lies behind ``e0``, ``e1``...
        names: What the printer needs.
        fields: Parameters that the addresses use, with their values.
        output: Address of the output element.
        walks: For each leaf, and under None for the output: its stride along each of `sizes`.
        prefix: What the names of pointers and parameters begin with.
    """

    sizes: tuple[int, ...]
    pointers: tuple[Pointer, ...]
    names: LeafNames
    fields: tuple[tuple[str, int], ...]
    output: str
    walks: Walks
    prefix: str = ""

    @classmethod
    def resolve(
        cls,
        exprs: Sequence[Expr],
        output: View,
        tensors: Sequence[TracedTensor],
        positions: Sequence[str],
        merge: Merge = collapse,
        anchors: Mapping[int, str] | None = None,
        prefix: str = "",
    ) -> Operands:
        """Resolves the leaves of `exprs`.

        Args:
            exprs: Expressions over `output.shape`.
            output: Where results go.
            tensors: The trace's tensors.
            positions: Names of the position along each dimension, outermost first; there may be more than are used,
                then the innermost ones count.
            merge: How dimensions are merged: `collapse`, `merge_rows` or what `merge_groups` gives.
            anchors: Tensors whose value is at hand under a name.
            prefix: Tells the names of these operands from those of others in the same kernel.

        Raises:
            OpRefusal: An operand cannot walk the merged dimensions with one stride, or is too large.
        """
        resolver = _Resolver(tensors, anchors or {}, _inner_extents(exprs), prefix)
        leaves = resolver.collect(exprs, output.shape)
        strides = [output.strides, *(strides for _, strides in leaves)]
        sizes, merged = merge(output.shape, strides)
        used = positions[len(positions) - len(sizes) :]
        address = _Addresses(used)
        out = address.text(f"{prefix}o", merged[0], 0)
        for (leaf, _), leaf_strides in zip(leaves, merged[1:], strict=True):
            resolver.name(leaf, leaf_strides, address)
        names = LeafNames(resolver.loads, resolver.iotas, anchors or {}, resolver.name_checks(exprs, address))
        walks = dict(zip((None, *(leaf for leaf, _ in leaves)), merged, strict=True))
        return cls(sizes, tuple(resolver.pointers), names, tuple(address.fields.items()), out, walks, prefix)


class _Addresses:
    """Writes addresses; a stride of 0 drops out, a stride of 1 is spelled, any other is a parameter."""

    def __init__(self, positions: Sequence[str]) -> None:
        self.positions = positions
        self.fields: dict[str, int] = {}

    def text(self, name: str, strides: Sequence[int], offset: int) -> str:
        terms = []
        for dim, (position, stride) in enumerate(zip(self.positions, strides, strict=True)):
            if stride == 1:
                terms.append(position)
            elif stride:
                terms.append(f"{position} * p.{self.field(f'{name}_stride{dim}', stride)}")
        if offset:
            terms.append(f"p.{self.field(f'{name}_offset', offset)}")
        return " + ".join(terms) or "0"

    def field(self, name: str, value: int) -> str:
        """Declares a parameter, and gives its name."""
        self.fields[name] = value
        return name


class _Resolver:
    def __init__(
        self, tensors: Sequence[TracedTensor], anchors: Mapping[int, str], inner: Mapping[Leaf, int], prefix: str
    ) -> None:
        self.tensors, self.anchors, self.inner, self.prefix = tensors, anchors, inner, prefix
        self.loads: dict[Load, tuple[str, str, bool]] = {}
        self.iotas: dict[Iota, str] = {}
        self.pointers: list[Pointer] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def collect(self, exprs: Sequence[Expr], shape: tuple[int, ...]) -> list[tuple[Leaf, tuple[int, ...]]]:
        """Every distinct leaf with its strides over `shape`."""
        found: dict[Leaf, tuple[int, ...]] = {}
        for expr in exprs:
            for node in walk(expr):
                if isinstance(node, Iota) or (isinstance(node, Load) and node.ref.tensor not in self.anchors):
                    view = node.view if isinstance(node, Iota) else node.ref.view
                    found[node] = self._strides(view, shape, self.inner.get(node))
        return list(found.items())

    def _strides(self, view: View, shape: tuple[int, ...], extent: int | None) -> tuple[int, ...]:
        """Strides of a leaf over `shape`, whose last dimension is `extent` for a leaf inside of a reduction."""
        target = shape if extent is None else (*shape[:-1], extent)
        strides = view.expand(target).strides
        return (*strides[:-1], 0) if view.shape[-1:] == (1,) else strides

    def name(self, leaf: Leaf, strides: tuple[int, ...], address: _Addresses) -> None:
        if isinstance(leaf, Iota):
            self.iotas[leaf] = address.text(f"{self.prefix}i{len(self.iotas)}", strides, leaf.view.offset)
            return
        source = self.tensors[leaf.ref.tensor]
        check_size(source)
        guarded = _leaves_bounds(leaf, source.layout.size)
        offset = leaf.ref.view.offset
        bound, rest = (0, offset) if guarded or offset < 0 else (offset, 0)
        key = (source.index, bound)
        number = self._numbers.setdefault(key, len(self.pointers))
        if number == len(self.pointers):
            self.pointers.append(Pointer(Argument(source.index, bound * source.dtype.size), source.dtype))
        text = address.text(f"{self.prefix}l{len(self.loads)}", strides, rest)
        self.loads[leaf] = (f"{self.prefix}e{number}", text, guarded)

    def name_checks(self, exprs: Sequence[Expr], address: _Addresses) -> dict[Checked, tuple[str, bool]]:
        """For each checked index, parameters with its number, and the record of faults, which is bound once."""
        nodes = dict.fromkeys(node for expr in exprs for node in walk(expr) if isinstance(node, Checked))
        if not nodes:
            return {}
        record = f"{self.prefix}e{len(self.pointers)}"
        self.pointers.append(Pointer(Argument(FAULTS, writes=True), None))
        found = {}
        for number, node in enumerate(nodes):
            low, high = interval(node.element) or (0, 0)
            check = address.field(f"{self.prefix}check{number}", CheckNumber(node.check + 1))
            found[node] = (f"p.{check}, {record}", low < 0 or high >= node.elements)
        return found


def _leaves_bounds(load: Load, size: int) -> bool:
    """Whether some position that a load may read lies outside of a buffer of `size` elements."""
    low, high = view_bounds(load.ref.view)
    indices = None if load.index is None else interval(load.index)
    if indices is not None:
        low, high = low + indices[0] * load.index_stride, high + indices[1] * load.index_stride
    return low < 0 or high >= size


def check_size(tensor: TracedTensor) -> None:
    """Refuses a tensor whose elements kernels cannot count.

    Raises:
        OpRefusal: It has 2^31 elements or more.
    """
    if tensor.layout.size >= MAX_ELEMENTS:
        raise OpRefusal(f"'{tensor.name}' has {tensor.layout.size} elements, more than kernels address (2^31)")


def merge_rows(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> Merged:
    """Merges all dimensions but the last, which stays as it is."""
    sizes, merged = collapse(shape[:-1], [s[:-1] for s in strides])
    return (*sizes, shape[-1]), [(*m, s[-1]) for m, s in zip(merged, strides, strict=True)]


def merge_groups(dims: Sequence[Sequence[int]]) -> Merge:
    """Merges each group of dimensions into one.

    Raises:
        OpRefusal: (when called) An operand does not walk a group with one stride.
    """

    def merge(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> Merged:
        columns: list[tuple[int, ...]] = []
        for group in dims:
            part, merged = collapse(tuple(shape[d] for d in group), [tuple(s[d] for d in group) for s in strides])
            if len(part) > 1:
                raise OpRefusal("an operand of the epilogue does not walk the result with one stride")
            columns.append(tuple(m[0] for m in merged))
        sizes = tuple(prod(shape[d] for d in group) for group in dims)
        return sizes, [tuple(column[i] for column in columns) for i in range(len(strides))]

    return merge


def _inner_extents(exprs: Sequence[Expr]) -> dict[Leaf, int]:
    """For each leaf inside of a reduction, the extent of that reduction; of nested ones, of the innermost."""
    extents: dict[Leaf, int] = {}
    for expr in exprs:
        for node in walk(expr):
            if isinstance(node, Reduce):
                for leaf in (leaf for arg in node.args for leaf in walk(arg)):
                    if isinstance(leaf, Load | Iota):
                        extents.setdefault(leaf, node.extent)  # the innermost reduction comes first
    return extents
