"""The function behind a decode step that chooses the next token: IR like a model's, compiled like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["NO_NUMBER", "next_token_ir"]

NO_NUMBER = -1  # chosen where the highest logit is NaN or infinite
_MAX_ROWS = 256

_Tensor = dict[str, Any]


def next_token_ir(vocabulary: int, dtype: str, places: int) -> dict[str, Any]:
    """IR of the greedy choice; of equal logits it takes the first.

    The logits are looked at as a matrix, so that many threadgroups share the search: the highest of each row and where
    it comes first, then the highest of all rows.

    Its inputs are ``logits`` [1, 1, `vocabulary`], ``positions`` int64 [1] of the token that gave them, and ``chosen``
    int64 [`places`]. Its outputs are ``tokens`` int64 [1, 1], the token, or 0 for want of one, so that a step which
    runs ahead has a row to look up; ``next_positions`` int64 [1]; and ``all_chosen``, which takes the place of
    ``chosen``: at each position, the token that was chosen to follow, or `NO_NUMBER`.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        places: Positions that there are.
    """
    rows = max(count for count in range(1, _MAX_ROWS + 1) if vocabulary % count == 0)
    graph = _Graph()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    positions = graph.input("positions", (1,), "int64")
    chosen = graph.input("chosen", (places,), "int64")
    matrix = graph.view(logits, (rows, vocabulary // rows))
    highest = graph.reduce("amax", matrix, dim=1)
    columns = graph.add("arange.default", "int64", (vocabulary,), end=vocabulary)
    first = graph.first_where_equal(matrix, highest, graph.view(columns, matrix["shape"]), dim=1, none=vocabulary)
    best = graph.reduce("amax", highest, dim=0)
    first = graph.first_where_equal(highest, best, first, dim=0, none=vocabulary)
    difference = graph.add("sub.Tensor", dtype, (1, 1), best, best)  # NaN for NaN and for infinity
    is_number = graph.add("eq.Scalar", "bool", (1, 1), difference, other=0)
    choice = graph.add("where.self", "int64", (1, 1), is_number, first, graph.full(NO_NUMBER, (1, 1)))
    token = graph.add("clamp.default", "int64", (1, 1), choice, min=0, name="tokens")
    following = graph.add("add.Tensor", "int64", (1,), positions, other=1, name="next_positions")
    flat = graph.view(choice, (1,))
    written = graph.add("index_copy.default", "int64", (places,), chosen, positions, flat, dim=0, name="all_chosen")
    return graph.build(token, following, written)


class _Graph:
    """IR under construction."""

    def __init__(self) -> None:
        self._inputs: list[_Tensor] = []
        self._nodes: list[dict[str, Any]] = []

    def input(self, name: str, shape: Sequence[int], dtype: str) -> _Tensor:
        self._inputs.append({"name": name, "shape": list(shape), "dtype": dtype})
        return self._inputs[-1]

    def add(
        self, op: str, dtype: str, shape: Sequence[int], *operands: _Tensor, name: str | None = None, **attrs: Any
    ) -> _Tensor:
        """Adds a node, and gives its result."""
        result = {"name": name or f"{op.partition('.')[0]}_{len(self._nodes)}", "shape": list(shape), "dtype": dtype}
        node = {"name": result["name"], "op_type": f"aten.{op}", "inputs": list(operands), "outputs": [result]}
        self._nodes.append({**node, "attrs": attrs})
        return result

    def view(self, tensor: _Tensor, shape: Sequence[int]) -> _Tensor:
        return self.add("view.default", tensor["dtype"], shape, tensor, size=list(shape))

    def full(self, value: int, shape: Sequence[int]) -> _Tensor:
        return self.add("full.default", "int64", shape, size=list(shape), fill_value=value)

    def reduce(self, op: str, tensor: _Tensor, dim: int) -> _Tensor:
        shape = [1 if axis == dim else size for axis, size in enumerate(tensor["shape"])]
        return self.add(f"{op}.default", tensor["dtype"], shape, tensor, dim=[dim], keepdim=True)

    def first_where_equal(self, values: _Tensor, wanted: _Tensor, places: _Tensor, dim: int, none: int) -> _Tensor:
        """The lowest of `places` where `values` equal what is wanted along `dim`; `none` where none does."""
        equal = self.add("eq.Tensor", "bool", values["shape"], values, wanted)
        shape = values["shape"]
        found = self.add("where.self", "int64", shape, equal, places, self.full(none, shape))
        return self.reduce("amin", found, dim)

    def build(self, *outputs: _Tensor) -> dict[str, Any]:
        return {
            "model_name": "next_token",
            "graph_inputs": self._inputs,
            "graph_outputs": list(outputs),
            "weights": [],
            "weight_name_mapping": {},
            "nodes": self._nodes,
        }
