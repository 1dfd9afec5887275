"""In-place changes through views of views: whatever PyTorch's memory holds in the end, the functional graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch_ir import extract_ir

import npu_compiler
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.functional import functionalize
from npu_compiler.ops.registry import is_in_place
from tests.partition.mixed import run_plan_on_cpu
from tests.support.extraction import Function
from tests.support.ir_builder import IRBuilder, Value, overload_of
from tests.support.reference_target import plan_ir

Draw = Callable[[Any], Any]


class SharedMemory:
    """A few tensors of one memory, each as the model has it and as PyTorch has it."""

    def __init__(self, draw: Draw, ops_of_the_cpu: bool) -> None:
        self.draw, self.builder, self.calls, self.ops_of_the_cpu = draw, IRBuilder(), list[str](), ops_of_the_cpu
        self.indices: dict[str, torch.Tensor] = {}
        shape = draw(st.sampled_from([(6,), (4, 6), (2, 3, 4), (3, 3), (2, 1, 5)]))
        self.given = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
        self.memory = self.given.clone()
        self.seen: list[tuple[Value, torch.Tensor]] = [(self.builder.input("x", shape), self.memory)]

    def _pick(self) -> tuple[Value, torch.Tensor]:
        return self.seen[self.draw(st.integers(0, len(self.seen) - 1))]

    def _call(self, op: str, value: Value, tensor: torch.Tensor, *args: Any) -> None:
        overload = overload_of(op)
        arguments = [other[1] if isinstance(other, tuple) and isinstance(other[0], Value) else other for other in args]
        try:
            results = overload(tensor, *arguments)
        except RuntimeError:
            return  # PyTorch refuses it: a view that strides cannot say, a change of repeated memory
        self.calls.append(f"{op} of {value.name}{list(tensor.shape)} {arguments}")
        symbols = [other[0] if isinstance(other, tuple) and isinstance(other[0], Value) else other for other in args]
        values = self.builder.call_all(op, value, *symbols)
        self.seen += zip(values, [results] if isinstance(results, torch.Tensor) else results, strict=True)

    def look(self) -> None:
        value, tensor = self._pick()
        rank, size = tensor.dim(), tensor.numel()
        dim = self.draw(st.integers(-rank, rank - 1)) if rank else 0
        extent = tensor.shape[dim] if rank else 0
        start, step = self.draw(st.integers(-4, 3)), self.draw(st.integers(1, 3))
        choices: list[tuple[Any, ...]] = [
            ("aten.detach.default",),
            ("aten.clone.default",),
            ("aten.contiguous.default",),
            ("aten.unsqueeze.default", self.draw(st.integers(0, rank))),
            ("aten.reshape.default", [size]),
            ("aten.view.default", [1, -1] if size else [1, 0]),
        ]
        if rank:
            choices += [
                ("aten.slice.Tensor", dim, start, self.draw(st.sampled_from([None, 2, -1])), step),
                ("aten.transpose.int", dim, 0),
                ("aten.flatten.using_ints", 0, -1),
                ("aten.split.Tensor", 2, dim),
                ("aten.expand.default", [2, *tensor.shape]),
                ("aten.permute.default", self.draw(st.permutations(range(rank)))),
            ]
        if extent:
            choices += [
                ("aten.select.int", dim, self.draw(st.integers(-extent, extent - 1))),
                ("aten.chunk.default", 2, dim),
                ("aten.unbind.int", dim),
                ("aten.narrow.default", dim, extent // 2, extent - extent // 2),
                ("aten.as_strided.default", [2], [2], self.draw(st.sampled_from([None, 0, 1]))),
            ]
            if self.ops_of_the_cpu:
                choices.append(("aten.unfold.default", dim, 1, self.draw(st.integers(1, 2))))
        if rank > 1:
            choices.append(("aten.diagonal.default", self.draw(st.integers(-1, 1)), 0, -1))
        if rank > 1 and 1 in tensor.shape:
            choices.append(("aten.squeeze.default",))
        op, *args = self.draw(st.sampled_from(choices))
        self._call(op, value, tensor, *args)

    def change(self) -> None:
        value, tensor = self._pick()
        same = [pair for pair in self.seen if pair[1].shape == tensor.shape]
        other = self.draw(st.sampled_from(same))
        if other[1].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and other[0] is not value:
            other = (value, tensor)  # PyTorch refuses partial overlaps, or reads what it has written
        choices: list[tuple[Any, ...]] = [
            ("aten.add_.Tensor", other),
            ("aten.mul_.Scalar", 3),
            ("aten.copy_.default", other),
            ("aten.fill_.Scalar", 7.0),
            ("aten.zero_.default",),
            ("aten.clamp_.default", 2.0, 9.0),
            ("aten.neg_.default",),
            ("aten.lt_.Scalar", 5),
        ]
        if self.ops_of_the_cpu and tensor.dim() and tensor.shape[0]:
            index = torch.tensor([0, tensor.shape[0] - 1][: tensor.shape[0]])
            picked = (self.builder.input(f"i{len(self.calls)}", tuple(index.shape), torch.int64), index)
            self.indices[f"i{len(self.calls)}"] = index
            choices.append(("aten.index_fill_.int_Scalar", 0, picked, -2.0))
        op, *args = self.draw(st.sampled_from(choices))
        self._call(op, value, tensor, *args)


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    "suppress_health_check": list(HealthCheck),
}


def _drawn(data: st.DataObject, ops_of_the_cpu: bool) -> tuple[SharedMemory, dict[str, Any], list[torch.Tensor]]:
    """What shares memory, the IR that gives all of it, and what PyTorch has."""
    shared = SharedMemory(data.draw, ops_of_the_cpu)
    for _ in range(data.draw(st.integers(1, 9))):
        (shared.change if data.draw(st.booleans()) else shared.look)()
    note("\n".join(shared.calls))
    outputs = [pair for pair in shared.seen if pair[1].numel()]
    return shared, shared.builder.build(*(value for value, _ in outputs)), [tensor for _, tensor in outputs]


@given(data=st.data())
@settings(max_examples=200, **_SETTINGS)
def test_every_view_is_what_pytorch_has_in_memory(data: st.DataObject) -> None:
    shared, ir, expected = _drawn(data, True)
    plan = npu_compiler.partition(ir, lambda op: False)
    results = run_plan_on_cpu(plan, {"x": shared.given, **shared.indices})
    for result, wanted in zip(results.values(), expected, strict=True):
        assert torch.equal(result, wanted)


@given(data=st.data())
@settings(max_examples=60, **_SETTINGS)
def test_programs_give_what_pytorch_has_in_memory(data: st.DataObject) -> None:
    shared, ir, expected = _drawn(data, False)
    results = plan_ir(ir).run({"x": shared.given.double()})
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted.double().numpy())


def _extracted(function: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What pytorch-ir itself makes of a function, in-place ops and all."""
    ir: dict[str, Any] = extract_ir(Function(function), tuple(torch.zeros(s, device="meta") for s in shapes)).to_dict()
    return ir


def test_what_is_stored_where_it_is_already_is_not_stored_again() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y[:, 0] += 1
        return y

    graph = functionalize(read_graph(_extracted(function, (4, 6)))).verify()
    assert [node.op for node in graph.nodes if "scatter" in node.op] == ["aten.select_scatter.default"]


def test_the_data_type_of_what_changes_stays() -> None:
    builder = IRBuilder()
    half, wide = builder.input("x", (4,), torch.float16), builder.input("y", (4,), torch.float32)
    flags = builder.input("z", (4,), torch.bool)
    added = builder.call("aten.add_.Tensor", builder.call("aten.tanh.default", half), wide)
    compared = builder.call("aten.lt_.Tensor", builder.call("aten.neg.default", wide), flags)
    ir = builder.build(added, compared)
    x, y = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) - 0.5
    first, second = plan_ir(ir).run({"x": x, "y": y, "z": y > 0})
    np.testing.assert_allclose(first, (x.tanh() + y).numpy())
    np.testing.assert_array_equal(second, (-y < (y > 0)).double().numpy())


def test_integers_that_would_become_numbers_with_a_point_are_refused() -> None:
    builder = IRBuilder()
    x = builder.call("aten.neg.default", builder.input("x", (4,), torch.int64))
    ir = builder.build(builder.call("aten.mul_.Scalar", x, 2))
    ir["nodes"][-1]["attrs"]["other"] = 0.5
    with pytest.raises(IRError, match="its definition gives float32"):
        npu_compiler.compile(ir, target="metal")


def test_lists_that_change_in_place_are_refused() -> None:
    ir = IRBuilder()
    x = ir.call("aten.tanh.default", ir.input("x", (4,)))
    made = ir.build(x)
    foreach = {"name": "foreach", "op_type": "aten._foreach_add_.Scalar", "outputs": [], "attrs": {"scalar": 1}}
    made["nodes"].append(foreach | {"inputs": made["graph_outputs"]})
    with pytest.raises(UnsupportedOpError, match="changes several tensors in place; extract the model with"):
        npu_compiler.partition(made)


def test_memory_read_by_strides_is_that_of_the_base() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x.t()[1:], (3, 2), (2, 1)) * 2

    ir = _extracted(function, (4, 6))
    x = torch.rand(4, 6, dtype=torch.float64)
    np.testing.assert_array_equal(plan_ir(ir).run({ir["graph_inputs"][0]["name"]: x})[0], function(x).numpy())


def test_no_in_place_op_needs_a_name_of_its_own() -> None:
    """Any in-place form of an op that has a definition is that op."""
    for name in ("aten.exp_.default", "aten.hardtanh_.default", "aten.atan2_.default", "aten.tril_.default"):
        assert is_in_place(name)
        pure = name.replace("_.", ".")
        assert npu_compiler.is_op_supported(name).ok == npu_compiler.is_op_supported(pure).ok
