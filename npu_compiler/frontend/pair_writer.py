"""Writes the real nodes that take the place of one that reads or makes complex numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.tensor.shapes import broadcast_shapes

__all__ = ["PairWriter", "Unspelled"]


class Unspelled(Exception):
    """There is no spelling by pairs; what is meant stays as it is."""


class PairWriter(IRBuilder):
    """The nodes in place of one, named after it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def add(
        self, op: str, dtype: str, shape: Sequence[int], /, *operands: IRTensor, name: str | None = None, **attrs: Any
    ) -> IRTensor:
        """As `IRBuilder.add`, under a name of its own."""
        return super().add(op, dtype, shape, *operands, name=name or f"{self._name}.{len(self._nodes)}", **attrs)

    def op(self, op: str, shape: Sequence[int], /, *operands: IRTensor, **attrs: Any) -> IRTensor:
        """Adds a node that gives float32."""
        return self.add(op, "float32", shape, *operands, **attrs)

    def binary(self, op: str, x: IRTensor, y: IRTensor) -> IRTensor:
        """Adds arithmetic on two tensors that broadcast."""
        return self.op(f"{op}.Tensor", broadcast_shapes(tuple(x["shape"]), tuple(y["shape"])), x, y)

    def part(self, pairs: IRTensor, index: int) -> IRTensor:
        """Real parts (0) or imaginary ones (1)."""
        shape = pairs["shape"][:-1]
        return self.op("select.int", shape, pairs, dim=len(shape), index=index)

    def parts(self, pairs: IRTensor) -> tuple[IRTensor, IRTensor]:
        return self.part(pairs, 0), self.part(pairs, 1)

    def pair(self, real: IRTensor, imaginary: IRTensor) -> IRTensor:
        """Pairs of two tensors that broadcast."""
        shape = broadcast_shapes(tuple(real["shape"]), tuple(imaginary["shape"]))
        both = (
            part if tuple(part["shape"]) == shape else self.op("expand.default", shape, part, size=list(shape))
            for part in (real, imaginary)
        )
        return self.stack(len(shape), *both)

    def stack(self, dim: int, *parts: IRTensor) -> IRTensor:
        """Puts tensors of one shape beside each other along a new dimension."""
        shape = list(parts[0]["shape"])
        shape.insert(dim, len(parts))
        return self.op("stack.default", shape, *parts, _tensor_list_sizes=[len(parts)], dim=dim)

    def finished(self, made: IRTensor, name: str) -> list[dict[str, Any]]:
        """All nodes, the last of which gives what was made under a name."""
        self.add("view.default", made["dtype"], made["shape"], made, name=name, size=list(made["shape"]))
        return self._nodes
