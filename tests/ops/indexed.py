"""Graphs that index by the values of a tensor, alone and fused with what stands around them; hostile values for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, NPUBuffer
from tests.support.ir_builder import IRBuilder, overload_of
from tests.support.running import host_array

__all__ = ["GRAPHS", "HOSTILE", "Indexed", "IndexedGraph", "indexed_ir"]

Call = Callable[..., Any]
"""``call(op, *args)``: builds a node, or computes it by torch."""

HOSTILE = (-1, 2**31 - 1, -(2**31), 2**31, 2**32 + 3, -(2**63), 2**63 - 1)
"""Beside those around the bound."""


@dataclass(frozen=True)
class IndexedGraph:
    """A graph with floating-point inputs ``x0``, ``x1``... and an index tensor ``ids``.

    Attributes:
        compute: What it computes, one tensor or several, from `Call`, the inputs and the indices.
        shapes: Of the floating-point inputs.
        ids: Shape of the indices.
        extent: Size of the dimension that they are for.
        lowest: The lowest index that there is.
        named: What an error calls the index tensor.
    """

    compute: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]
    extent: int
    lowest: int = 0
    named: str = "input 'ids'"


def _embedding(call: Call, table: Any, ids: Any) -> Any:
    return call("embedding.default", table, ids)


def _next(call: Call, table: Any, ids: Any) -> Any:
    return call("embedding.default", table, call("abs.default", ids))


def _norm(call: Call, table: Any, ids: Any) -> Any:
    return call("layer_norm.default", _embedding(call, table, ids), [8])


def _linear(call: Call, table: Any, weight: Any, ids: Any) -> Any:
    return call("linear.default", _norm(call, table, ids), weight)


def _added(call: Call, table: Any, weight: Any, x: Any, ids: Any) -> Any:
    return call("add.Tensor", call("linear.default", x, weight), _embedding(call, table, ids))


def _mean(call: Call, table: Any, ids: Any) -> Any:
    return call("mean.dim", _embedding(call, table, ids), [1])


def _joined(call: Call, table: Any, x: Any, ids: Any) -> Any:
    return call("cat.default", [x, _embedding(call, table, ids)], 1)


def _padded(call: Call, table: Any, ids: Any) -> Any:
    return call("constant_pad_nd.default", _embedding(call, table, ids), (0, 0, 1, 2))


def _index(call: Call, table: Any, ids: Any) -> Any:
    return call("index.Tensor", table, [ids])


def _second_index(call: Call, table: Any, ids: Any) -> Any:
    rows = call("arange.default", 10)
    return call("index.Tensor", table, [call("view.default", rows, [10, 1]), ids])


def _gather(call: Call, table: Any, ids: Any) -> Any:
    return call("gather.default", table, 1, ids)


def _index_select(call: Call, table: Any, ids: Any) -> Any:
    return call("index_select.default", table, 1, ids)


def _index_copy(call: Call, cache: Any, new: Any, ids: Any) -> Any:
    return call("index_copy.default", cache, 1, ids, new)


def _copied_index_copy(call: Call, cache: Any, new: Any, ids: Any) -> Any:
    return call("add.Tensor", _index_copy(call, cache, new, ids), cache)


def _copied_norm(call: Call, cache: Any, new: Any, ids: Any) -> Any:
    return _index_copy(call, cache, call("softmax.int", new, -1), ids)


def _attention(call: Call, cache: Any, new: Any, query: Any, ids: Any) -> Any:
    keys = call("index_copy.default", cache, 2, ids, new)
    return call("scaled_dot_product_attention.default", query, keys, keys)


def _decode(call: Call, keys: Any, values: Any, key: Any, value: Any, query: Any, ids: Any) -> Any:
    """A decode step: on a CUDA device of compute capability 9.0, attention itself writes both caches."""
    keys, values = (call("index_copy.default", old, 2, ids, new) for old, new in ((keys, key), (values, value)))
    return call("scaled_dot_product_attention.default", query, keys, values), keys, values


_CACHES = ((1, 2, 64, 16), (1, 2, 64, 16))

GRAPHS = {
    "embedding": IndexedGraph(_embedding, ((10, 8),), (2, 3), 10),
    "embedding of computed ids": IndexedGraph(_next, ((10, 8),), (2, 3), 10, -9, "tensor 'abs_0'"),
    "embedding, norm": IndexedGraph(_norm, ((10, 8),), (2, 3), 10),
    "embedding, norm of one row, linear": IndexedGraph(_linear, ((10, 8), (6, 8)), (1, 1), 10),
    "embedding after linear": IndexedGraph(_added, ((10, 6), (6, 8), (3, 8)), (3,), 10),
    "embedding, mean of rows": IndexedGraph(_mean, ((10, 8),), (2, 3), 10),
    "embedding, cat": IndexedGraph(_joined, ((10, 8), (2, 2, 8)), (2, 3), 10),
    "embedding, pad": IndexedGraph(_padded, ((10, 8),), (2, 3), 10),
    "index": IndexedGraph(_index, ((10, 8),), (2, 3), 10, -10),
    "index of two": IndexedGraph(_second_index, ((10, 8),), (1, 3), 8, -8),
    "gather": IndexedGraph(_gather, ((3, 8),), (2, 3), 8),
    "index_select": IndexedGraph(_index_select, ((3, 8),), (5,), 8),
    "index_copy in place": IndexedGraph(_index_copy, ((2, 6, 4), (2, 3, 4)), (3,), 6),
    "index_copy of a copy": IndexedGraph(_copied_index_copy, ((2, 6, 4), (2, 3, 4)), (3,), 6),
    "softmax, index_copy": IndexedGraph(_copied_norm, ((2, 6, 4), (2, 3, 4)), (3,), 6),
    "index_copy, attention": IndexedGraph(_attention, ((1, 2, 16, 16), (1, 2, 1, 16), (1, 2, 1, 16)), (1,), 16),
    "decode": IndexedGraph(_decode, (*_CACHES, *((1, 2, 1, 16),) * 3), (1,), 64),
    "decode of two tokens": IndexedGraph(_decode, (*_CACHES, *((1, 2, 2, 16),) * 3), (2,), 64),
}


def indexed_ir(name: str, compute: torch.dtype, ids: torch.dtype) -> dict[str, Any]:
    """IR of a graph of `GRAPHS`, for tensors of these data types."""
    graph, builder = GRAPHS[name], IRBuilder("indexed")
    floats = [builder.input(f"x{i}", shape, compute) for i, shape in enumerate(graph.shapes)]
    given = builder.input("ids", graph.ids, torch.int64)  # torch itself takes no other for some ops

    def call(op: str, *args: Any) -> Any:
        return builder.call(f"aten.{op}", *args)

    ir = builder.build(*_several(graph.compute(call, *floats, given)))
    if ids != torch.int64:
        _retype(ir, {"ids", "abs_0"}, str(ids).removeprefix("torch."))
    return ir


class Indexed:
    """A graph of `GRAPHS`, compiled for a device."""

    def __init__(
        self,
        name: str,
        device: Device,
        compute: torch.dtype,
        ids: torch.dtype,
        executor: Callable[..., Executor] = Executor,
    ) -> None:
        self.graph, self.device, self.ids = GRAPHS[name], device, ids
        generator = torch.Generator().manual_seed(0)
        draw = [torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for shape in self.graph.shapes]
        self.floats = [tensor.to(compute) for tensor in draw]
        self.executor = executor(npu_compiler.compile(indexed_ir(name, compute, ids), target=device.target), device)

    def inputs(self, ids: Sequence[int]) -> dict[str, NPUBuffer]:
        """New buffers."""
        given = np.array(ids, str(self.ids).removeprefix("torch.")).reshape(self.graph.ids)
        specs = {spec.name: spec for spec in self.executor.plan.inputs}
        arrays = {f"x{i}": host_array(x, specs[f"x{i}"].host_dtype.numpy) for i, x in enumerate(self.floats)}
        every = {**arrays, "ids": given}
        return {name: NPUBuffer.from_numpy(every[name], self.device, spec) for name, spec in specs.items()}

    def run(self, ids: Sequence[int], **options: Any) -> list[NDArray[Any]]:
        outputs = self.executor.run(self.inputs(ids), **options)
        return [outputs[spec.name].to_numpy().astype(np.float64) for spec in self.executor.plan.outputs]

    def is_inside(self, index: int) -> bool:
        return self.graph.lowest <= index < self.graph.extent

    def expected(self, ids: Sequence[int]) -> list[NDArray[Any]]:
        """What torch computes, of the same numbers in float64."""

        def call(op: str, *args: Any) -> Any:
            return overload_of(f"aten.{op}")(*args)

        indices = torch.tensor(ids, dtype=torch.int64).reshape(self.graph.ids)
        results = _several(self.graph.compute(call, *(x.double() for x in self.floats), indices))
        return [result.numpy() for result in results]

    def check(self, ids: Sequence[int], **options: Any) -> None:
        """Runs with these indices: the result is torch's, or the error tells the truth about one of them.

        Args:
            ids: The indices.
            options: For the executor's `run`.
        """
        if all(map(self.is_inside, ids)):
            for result, expected in zip(self.run(ids, **options), self.expected(ids), strict=True):
                np.testing.assert_allclose(result, expected, rtol=0.02, atol=0.02)
            return
        with pytest.raises(InputError) as caught:
            self.run(ids, **options)
        self.check_refusal(str(caught.value), ids)

    def check_refusal(self, message: str, ids: Sequence[int]) -> None:
        words = r"(\w+ '\w+'): given the index (-?\d+) at position (\[.*?\]), expected -?\d+ to (\d+)"
        found = re.match(words, message)
        assert found is not None, message
        named, value, position, highest = found.groups()
        given = np.array(ids, object).reshape(self.graph.ids)[tuple(map(int, re.findall(r"\d+", position)))]
        assert not self.is_inside(given)
        assert (named, int(highest)) == (self.graph.named, self.graph.extent - 1)
        assert self.graph.named != "input 'ids'" or int(value) == given


def _several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _retype(ir: dict[str, Any], names: set[str], dtype: str) -> None:
    """Gives tensors of an IR another data type, wherever they are declared."""
    nodes = [entry for node in ir["nodes"] for entry in (*node["inputs"], *node["outputs"])]
    for entry in (*ir["graph_inputs"], *ir["graph_outputs"], *nodes):
        if entry["name"] in names:
            entry["dtype"] = dtype
