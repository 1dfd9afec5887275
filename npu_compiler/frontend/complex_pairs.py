"""Complex numbers as pairs: a tensor [...] of complex64 becomes one of float32 [..., 2], real parts ahead of imaginary.

What makes complex numbers, reads them and turns them into real ones again is spelled with real ops, where all of it can
be: numbers that reach an input, an output or a weight of the model as complex ones, or an op that is not listed here,
stay what they are, with all that they are computed from and with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_compiler.frontend import fourier
from npu_compiler.frontend.pair_writer import PairWriter, Unspelled
from npu_compiler.graph.ir_builder import IRTensor

__all__ = ["spell_complex_as_pairs"]

_COMPLEX = "complex64"
Tensor = Mapping[str, Any]


def spell_complex_as_pairs(ir: Mapping[str, Any]) -> Mapping[str, Any]:
    """The IR without complex numbers that have a spelling as pairs; without any, itself."""
    nodes = ir.get("nodes")
    if not isinstance(nodes, list) or not any(_complex_names(node) for node in nodes):
        return ir
    groups = _Groups()
    for node in nodes:
        groups.join(_complex_names(node))
    for key in ("graph_inputs", "graph_outputs", "weights"):
        for name in _names(ir.get(key)):
            groups.refuse(name)
    spelled: dict[int, list[dict[str, Any]]] = {}
    for index, node in enumerate(nodes):
        names = _complex_names(node)
        if names and groups.is_open(names[0]):
            try:
                spelled[index] = _spelled(node)
            except Unspelled:
                groups.refuse(names[0])
    result: list[Any] = []
    for index, node in enumerate(nodes):
        names = _complex_names(node)
        result += spelled[index] if names and groups.is_open(names[0]) else [node]
    return {**ir, "nodes": result}


class _Groups:
    """Complex tensors that one node reads or makes belong together: all are spelled as pairs, or none."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        self._refused: set[str] = set()

    def join(self, names: Sequence[str]) -> None:
        for name in names:
            first, other = self._root(names[0]), self._root(name)
            self._parent[other] = first

    def refuse(self, name: str) -> None:
        self._refused.add(self._root(name))

    def is_open(self, name: str) -> bool:
        return self._root(name) not in self._refused

    def _root(self, name: str) -> str:
        while self._parent.setdefault(name, name) != name:
            name = self._parent[name]
        return name


def _names(tensors: Any) -> list[str]:
    """Names of the complex tensors of a list."""
    given = tensors if isinstance(tensors, (list, tuple)) else ()
    return [t["name"] for t in given if _is_mapping(t) and t.get("dtype") == _COMPLEX and "name" in t]


def _complex_names(node: Any) -> list[str]:
    return [*_names(node.get("inputs")), *_names(node.get("outputs"))] if _is_mapping(node) else []


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(value, Mapping)  # the abstract class takes its time to say so


@dataclass(frozen=True)
class _Node:
    """A node that reads or makes complex numbers.

    Attributes:
        writer: What takes its place.
        inputs: What it reads; complex numbers as pairs.
        are_pairs: Of each input, whether it is such.
        attrs: Its attributes.
        shape: Of its result, without the dimension of pairs.
    """

    writer: PairWriter
    inputs: list[IRTensor]
    are_pairs: list[bool]
    attrs: Mapping[str, Any]
    shape: tuple[int, ...]

    @property
    def operand(self) -> IRTensor:
        """The only complex input, and the only one at all."""
        if self.are_pairs != [True]:
            raise Unspelled
        return self.inputs[0]

    @property
    def rank(self) -> int:
        """Dimensions of the first input, without that of pairs."""
        return len(self.inputs[0]["shape"]) - self.are_pairs[0]

    def dim(self, name: str, default: int = 0) -> int:
        """A dimension of the first input, counted from the front."""
        given = self.attrs.get(name, default)
        if type(given) is not int or not self.rank:
            raise Unspelled
        return given % self.rank


_Spelling = Callable[[_Node], IRTensor]


def _spelled(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The real nodes that take the place of one.

    Raises:
        Unspelled: There is no spelling of it.
    """
    outputs, attrs = node.get("outputs"), node.get("attrs") or {}
    name = str(node.get("op_type"))
    if not isinstance(outputs, list) or len(outputs) != 1 or not isinstance(attrs, Mapping):
        raise Unspelled
    if not name.startswith("aten.") or attrs.get("_tensor_keywords"):
        raise Unspelled
    base = name.split(".")[1]
    spelling = _SPELLINGS.get(base) or (_transformed(base) if base in fourier.TRANSFORMS else None)
    if spelling is None:
        raise Unspelled
    writer = PairWriter(str(node.get("name")))
    pairs = [tensor.get("dtype") == _COMPLEX for tensor in node["inputs"]]
    inputs = [_as_pairs(tensor) if pair else dict(tensor) for tensor, pair in zip(node["inputs"], pairs, strict=True)]
    output = outputs[0]
    made = spelling(_Node(writer, inputs, pairs, attrs, tuple(output["shape"])))
    expected = _as_pairs(output) if output["dtype"] == _COMPLEX else output
    if list(made["shape"]) != list(expected["shape"]) or made["dtype"] != expected["dtype"]:
        raise Unspelled
    return writer.finished(made, output["name"])


def _as_pairs(tensor: Tensor) -> IRTensor:
    kept = {key: value for key, value in tensor.items() if key not in ("shape", "dtype")}
    return {**kept, "shape": [*tensor["shape"], 2], "dtype": "float32"}


def _same(node: _Node) -> IRTensor:
    return node.operand


def _reshaped(node: _Node) -> IRTensor:
    return node.writer.op("reshape.default", (*node.shape, 2), node.operand, shape=[*node.shape, 2])


def _expanded(node: _Node) -> IRTensor:
    return node.writer.op("expand.default", (*node.shape, 2), node.operand, size=[*node.shape, 2])


def _cloned(node: _Node) -> IRTensor:
    return node.writer.op("clone.default", (*node.shape, 2), node.operand)


def _transposed(node: _Node) -> IRTensor:
    dims = {name: node.dim(name) for name in ("dim0", "dim1")}
    return node.writer.op("transpose.int", (*node.shape, 2), node.operand, **dims)


def _permuted(node: _Node) -> IRTensor:
    dims = [dim % node.rank for dim in node.attrs["dims"]]
    return node.writer.op("permute.default", (*node.shape, 2), node.operand, dims=[*dims, node.rank])


def _along(op: str) -> _Spelling:
    """An op that keeps a dimension's number."""

    def spelled(node: _Node) -> IRTensor:
        if not all(node.are_pairs):
            raise Unspelled
        attrs = {**node.attrs, "dim": node.dim("dim")}
        return node.writer.op(op, (*node.shape, 2), *node.inputs, **attrs)

    return spelled


def _part(index: int) -> _Spelling:
    return lambda node: node.writer.part(node.operand, index)


def _conjugate(node: _Node) -> IRTensor:
    real, imaginary = node.writer.parts(node.operand)
    return node.writer.pair(real, node.writer.same("neg.default", imaginary))


def _absolute(node: _Node) -> IRTensor:
    return node.writer.same("hypot.default", *node.writer.parts(node.operand))


def _angle(node: _Node) -> IRTensor:
    real, imaginary = node.writer.parts(node.operand)
    return node.writer.same("atan2.default", imaginary, real)


def _negative(node: _Node) -> IRTensor:
    return node.writer.same("neg.default", node.operand)


def _from_parts(node: _Node) -> IRTensor:
    if node.are_pairs != [False, False]:
        raise Unspelled
    return node.writer.pair(*node.inputs)


def _polar(node: _Node) -> IRTensor:
    if node.are_pairs != [False, False]:
        raise Unspelled
    writer, (length, angle) = node.writer, node.inputs
    return writer.pair(*(writer.binary("mul", length, writer.same(f"{f}.default", angle)) for f in ("cos", "sin")))


def _paired(node: _Node) -> IRTensor:
    if node.are_pairs != [False]:
        raise Unspelled
    return node.inputs[0]


def _product(node: _Node) -> IRTensor:
    if node.are_pairs != [True, True]:
        return _scaled("mul")(node)
    writer = node.writer
    (a, b), (c, d) = (writer.parts(tensor) for tensor in node.inputs)
    real = writer.binary("sub", writer.binary("mul", a, c), writer.binary("mul", b, d))
    return writer.pair(real, writer.binary("add", writer.binary("mul", a, d), writer.binary("mul", b, c)))


def _scaled(op: str) -> _Spelling:
    """Complex numbers times real ones, or by them."""

    def spelled(node: _Node) -> IRTensor:
        writer, other = node.writer, node.attrs.get("other")
        if node.are_pairs == [True]:
            if type(other) not in (int, float) or node.attrs.get("rounding_mode"):
                raise Unspelled
            return writer.same(f"{op}.Tensor", node.operand, other=other)
        if sorted(node.are_pairs) != [False, True] or (op == "div" and node.are_pairs[1]):
            raise Unspelled
        pair, real = node.inputs if node.are_pairs[0] else reversed(node.inputs)
        return writer.binary(op, pair, writer.view(real, (*real["shape"], 1)))

    return spelled


def _summed(op: str) -> _Spelling:
    def spelled(node: _Node) -> IRTensor:
        if node.are_pairs != [True, True] or node.attrs.get("alpha", 1) != 1:
            raise Unspelled
        return node.writer.binary(op, *node.inputs)

    return spelled


def _transformed(name: str) -> _Spelling:
    def spelled(node: _Node) -> IRTensor:
        if len(node.inputs) != 1:
            raise Unspelled
        return fourier.transformed(node.writer, name, node.inputs[0], node.are_pairs[0], node.attrs)

    return spelled


def _spellings() -> Iterator[tuple[str, _Spelling]]:
    for name in ("alias", "detach", "resolve_conj", "resolve_neg", "view_as_real", "lift_fresh_copy"):
        yield name, _same
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"):
        yield name, _reshaped
    for name in ("clone", "contiguous"):
        yield name, _cloned
    for name in ("conj", "_conj", "conj_physical", "_conj_physical"):
        yield name, _conjugate
    for op in ("slice.Tensor", "select.int", "cat.default"):
        yield op.partition(".")[0], _along(op)


_SPELLINGS: Mapping[str, _Spelling] = {
    **dict(_spellings()),
    "expand": _expanded,
    "transpose": _transposed,
    "permute": _permuted,
    "real": _part(0),
    "imag": _part(1),
    "abs": _absolute,
    "angle": _angle,
    "neg": _negative,
    "complex": _from_parts,
    "polar": _polar,
    "view_as_complex": _paired,
    "mul": _product,
    "div": _scaled("div"),
    "add": _summed("add"),
    "sub": _summed("sub"),
}
