"""What each op must read to give some of its rows: positions along one dimension of its result.

A rule gives the dimension of each operand along which the same positions are enough, or nothing where the wanted rows
depend on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from npu_compiler.graph.ir import OpNode, TensorSpec
from npu_compiler.ops.registry import definition, kind_of

__all__ = ["MALFORMED", "Passage", "Rows", "passage"]

Shape = tuple[int, ...]

MALFORMED = (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError)
"""What attributes raise that an op's definition refuses: such a node stays as it is, for the definition to say why."""


@dataclass(frozen=True)
class Rows:
    """Positions along a dimension.

    Attributes:
        count: How many.
        size: Of how many.
        known: The positions, where they are known when compiling.
        index: Else the name of the tensor [count] that holds them, integers.
        wraps: Whether negative ones of these count from the end.
    """

    count: int
    size: int
    known: range | None = None
    index: str = ""
    wraps: bool = False


@dataclass(frozen=True)
class Passage:
    """How a node gives some positions of a dimension of its result.

    Attributes:
        dims: By parameter, the dimension of which the same positions are read; other operands are read as they are.
        attrs: Attributes that change.
        op: The op that gives them, where it is another one; it reads `self` alone.
        item: Of a list of tensors, the only one that is read.
    """

    dims: Mapping[str, int]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    op: str | None = None
    item: int | None = None


@dataclass(frozen=True)
class _Call:
    """A node with the shapes that its rule looks at."""

    node: OpNode
    tensors: Mapping[str, TensorSpec]
    dim: int
    rows: Rows

    @property
    def output(self) -> Shape:
        return self.tensors[self.node.outputs[0]].shape

    @property
    def rank(self) -> int:
        return len(self.output)

    def shape(self, parameter: str) -> Shape:
        value = self.node.inputs[parameter]
        return self.tensors[value if isinstance(value, str) else value[0]].shape

    def broadcast(self, parameter: str, shape: Shape | None = None) -> dict[str, int]:
        """The dimension of an operand that broadcasts to the result; none where it has one position for all."""
        own = self.shape(parameter) if shape is None else shape
        dim = self.dim - (self.rank - len(own))
        return {parameter: dim} if dim >= 0 and own[dim] != 1 else {}

    def number(self, key: str, default: int = 0) -> int:
        return int(self.node.attrs.get(key, default))

    def along(self, key: str = "dim", default: int = 0, rank: int | None = None) -> int:
        """An attribute that names a dimension, counted from the front."""
        return self.number(key, default) % max(self.rank if rank is None else rank, 1)


Rule = Callable[[_Call], Passage | None]


def passage(node: OpNode, tensors: Mapping[str, TensorSpec], dim: int, rows: Rows) -> Passage | None:
    """How a node gives only `rows` of dimension `dim` of its results.

    Args:
        node: It reads something and makes something.
        tensors: Those that it reads and makes, whole.
        dim: Counted from the front.
        rows: Fewer than all.

    Returns:
        None where it cannot, or no rule says how.
    """
    entry = definition(node.op)
    rule = _RULES.get(kind_of(node.op))
    if rule is None and entry is not None and entry.family == "elementwise":
        rule = _elementwise
    if rule is None or any(0 in tensors[name].shape for name in (*node.tensors(), *node.outputs)):
        return None
    try:
        found = rule(_Call(node, tensors, dim, rows))
    except MALFORMED:
        return None
    return found if found is not None and _names_rows(found, node, tensors, rows) else None


def _names_rows(found: Passage, node: OpNode, tensors: Mapping[str, TensorSpec], rows: Rows) -> bool:
    """Whether all dimensions that are to be read have as many positions as the result."""
    for parameter, dim in found.dims.items():
        value = node.inputs[parameter]
        shapes = [tensors[name].shape for name in ((value,) if isinstance(value, str) else value)]
        if not all(0 <= dim < len(shape) and shape[dim] == rows.size for shape in shapes):
            return False
    return True


def _elementwise(call: _Call) -> Passage:
    dims: dict[str, int] = {}
    for parameter in call.node.inputs:
        dims |= call.broadcast(parameter)
    return Passage(dims)


def _converted(call: _Call) -> Passage:
    return Passage({"self": call.dim})  # of the other tensor only the data type is asked for


def _reordered(order: Callable[[_Call], list[int]]) -> Rule:
    return lambda call: Passage({"self": order(call)[call.dim]})


def _swapped(first: str, second: str) -> Callable[[_Call], list[int]]:
    def order(call: _Call) -> list[int]:
        dims = list(range(call.rank))
        a, b = call.along(first), call.along(second)
        dims[a], dims[b] = b, a
        return dims

    return order


def _permuted(call: _Call) -> list[int]:
    return [int(dim) % call.rank for dim in call.node.attrs["dims"]]


def _moved(call: _Call) -> list[int]:
    source, destination = call.along("source"), call.along("destination")
    dims = [dim for dim in range(call.rank) if dim != source]
    dims.insert(destination, source)
    return dims


def _reshaped(call: _Call) -> Passage | None:
    """A dimension survives where one of the same size has as many elements in front of it, and so behind it."""
    given, made, dim = call.shape("self"), call.output, call.dim
    for own, size in enumerate(given):
        if size == made[dim] and prod(given[:own]) == prod(made[:dim]):
            return Passage({"self": own}, {"shape": _resized(call)}, "aten.reshape.default")
    return None


def _expanded(call: _Call) -> Passage:
    return Passage(call.broadcast("self"), {"size": _resized(call)}, "aten.expand.default")


def _resized(call: _Call) -> list[int]:
    return [*call.output[: call.dim], call.rows.count, *call.output[call.dim + 1 :]]


def _part(call: _Call) -> Passage | None:
    """A part of another dimension, or several such parts."""
    return None if call.along() == call.dim else Passage({"self": call.dim})


def _one_of(call: _Call) -> Passage:
    """One position of another dimension, which is gone."""
    gone = call.along(rank=call.rank + 1)
    return Passage({"self": call.dim + (call.dim >= gone)})


def _item(call: _Call) -> Passage:
    return Passage({"self": call.dim}, item=range(len(call.node.inputs["self"]))[call.number("index")])


def _joined(call: _Call) -> Passage | None:
    parts = [call.tensors[name].shape for name in call.node.inputs["tensors"]]
    fits = call.along() != call.dim and all(len(part) == call.rank for part in parts)
    return Passage({"tensors": call.dim}) if fits else None


def _stacked(call: _Call) -> Passage | None:
    new = call.along()
    return None if new == call.dim else Passage({"tensors": call.dim - (call.dim > new)})


def _embedded(call: _Call) -> Passage | None:
    return Passage({"indices": call.dim}) if call.dim < call.rank - 1 else None


def _over_others(call: _Call) -> Passage | None:
    """Softmax over another dimension."""
    return None if call.along() == call.dim else Passage({"self": call.dim})


def _normalized(call: _Call) -> Passage | None:
    inside = call.rank - len(call.node.attrs["normalized_shape"])
    return Passage({next(iter(call.node.inputs)): call.dim}) if call.dim < inside else None


def _reduced(call: _Call) -> Passage | None:
    dim, rank = call.node.attrs.get("dim"), len(call.shape("self"))
    reduced = {int(d) % rank for d in ([dim] if isinstance(dim, int) else dim or ())}
    if not reduced:
        return None
    kept = range(rank) if call.node.attrs.get("keepdim") else [d for d in range(rank) if d not in reduced]
    own = kept[call.dim]
    return None if own in reduced else Passage({"self": own})


def _linear(call: _Call) -> Passage | None:
    return Passage({"input": call.dim}) if call.dim < call.rank - 1 else None


def _multiplied(left: str, right: str, added: str = "") -> Rule:
    """Rows of the left matrix; of dimensions ahead of both matrices, those of each that has them."""

    def rule(call: _Call) -> Passage | None:
        if call.dim == call.rank - 1 or min(len(call.shape(left)), len(call.shape(right))) < 2:
            return None
        dims = call.broadcast(left)
        dims |= call.broadcast(right) if call.dim < call.rank - 2 else {}
        return Passage(dims | (call.broadcast(added) if added else {}))

    return rule


def _attended(call: _Call) -> Passage | None:
    """Rows of the queries and of the mask; or some of the batch, of all that has it."""
    mask = call.broadcast("attn_mask") if "attn_mask" in call.node.inputs else {}
    if call.dim == 0 and call.rank == 4:
        return Passage({"query": 0, "key": 0, "value": 0} | mask)
    if call.dim != call.rank - 2:
        return None
    if call.node.attrs.get("is_causal"):
        last = call.shape("key")[-2] - 1
        sees_all = call.rows.known is not None and min(call.rows.known) >= last
        return Passage({"query": call.dim}, {"is_causal": False}) if sees_all else None
    return Passage({"query": call.dim} | mask)


_RULES: Mapping[str, Rule] = {
    "type_as": _converted,
    "transpose": _reordered(_swapped("dim0", "dim1")),
    "swapaxes": _reordered(_swapped("axis0", "axis1")),
    "t": _reordered(lambda call: [*reversed(range(call.rank))]),
    "permute": _reordered(_permuted),
    "movedim": _reordered(_moved),
    **dict.fromkeys(("reshape", "view", "view_as"), _reshaped),
    **dict.fromkeys(("flatten", "unflatten", "unsqueeze", "squeeze"), _reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(("slice", "narrow", "index_select"), _part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _part),
    **dict.fromkeys(("select", "unbind"), _one_of),
    "getitem": _item,
    "cat": _joined,
    "stack": _stacked,
    "embedding": _embedded,
    **dict.fromkeys(("softmax", "safe_softmax"), _over_others),
    "log_softmax": _over_others,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all"), _reduced),
    "linear": _linear,
    "matmul": _multiplied("self", "other"),
    "mm": _multiplied("self", "mat2"),
    "addmm": _multiplied("mat1", "mat2", "self"),
    "baddbmm": _multiplied("batch1", "batch2", "self"),
    "scaled_dot_product_attention": _attended,
}
