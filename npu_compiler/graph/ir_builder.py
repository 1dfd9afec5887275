"""IR made by the project itself, node by node: the same that an extractor writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.ops.registry import qualified

__all__ = ["IRBuilder", "IRTensor"]

IRTensor = dict[str, Any]
"""A tensor as IR has it: ``name``, ``shape`` and ``dtype``."""


class IRBuilder:
    """IR under construction."""

    def __init__(self) -> None:
        self._inputs: list[IRTensor] = []
        self._nodes: list[dict[str, Any]] = []

    def input(self, name: str, shape: Sequence[int], dtype: str) -> IRTensor:
        """Adds an input."""
        self._inputs.append({"name": name, "shape": list(shape), "dtype": dtype})
        return self._inputs[-1]

    def add(
        self, op: str, dtype: str, shape: Sequence[int], /, *operands: IRTensor, name: str | None = None, **attrs: Any
    ) -> IRTensor:
        """Adds a node, and gives its result; an op with no namespace is one of ATen."""
        result = {"name": name or f"{op.split('.')[-2]}_{len(self._nodes)}", "shape": list(shape), "dtype": dtype}
        self.add_all(op, (result,), *operands, **attrs)
        return result

    def add_all(self, op: str, results: Sequence[IRTensor], *operands: IRTensor, **attrs: Any) -> None:
        """Adds a node with several results; it has the first one's name."""
        own = {"name": results[0]["name"], "op_type": qualified(op)}
        node = {**own, "inputs": list(operands), "outputs": list(results)}
        self._nodes.append({**node, "attrs": attrs})

    def same(self, op: str, tensor: IRTensor, *others: IRTensor, **attrs: Any) -> IRTensor:
        """Adds a node whose result has the shape and data type of its first operand."""
        return self.add(op, tensor["dtype"], tensor["shape"], tensor, *others, **attrs)

    def compare(self, op: str, shape: Sequence[int], *operands: IRTensor, **attrs: Any) -> IRTensor:
        """Adds a node that gives booleans."""
        return self.add(op, "bool", shape, *operands, **attrs)

    def view(self, tensor: IRTensor, shape: Sequence[int]) -> IRTensor:
        return self.add("view.default", tensor["dtype"], shape, tensor, size=list(shape))

    def full(self, value: float, shape: Sequence[int], dtype: str = "int64") -> IRTensor:
        return self.add("full.default", dtype, shape, size=list(shape), fill_value=value)

    def arange(self, shape: Sequence[int], count: int) -> IRTensor:
        """0 to `count`, as a tensor of a shape with so many elements."""
        return self.view(self.add("arange.default", "int64", (count,), end=count), shape)

    def reduce(self, op: str, tensor: IRTensor, dim: int) -> IRTensor:
        """Adds a reduction over one dimension, which stays as one of size 1."""
        shape = [1 if axis == dim else size for axis, size in enumerate(tensor["shape"])]
        return self.add(op, tensor["dtype"], shape, tensor, dim=[dim], keepdim=True)

    def lowest_where(self, condition: IRTensor, places: IRTensor, dim: int, none: int) -> IRTensor:
        """The lowest of `places` where the condition holds along `dim`; `none` where it does nowhere."""
        shape = condition["shape"]
        found = self.add("where.self", "int64", shape, condition, places, self.full(none, shape))
        return self.reduce("amin.default", found, dim)

    def build(self, name: str, outputs: Sequence[IRTensor], **fields: Any) -> dict[str, Any]:
        """The IR of a model without weights."""
        return {
            "model_name": name,
            "graph_inputs": self._inputs,
            "graph_outputs": list(outputs),
            "weights": [],
            "weight_name_mapping": {},
            "nodes": self._nodes,
            **fields,
        }
