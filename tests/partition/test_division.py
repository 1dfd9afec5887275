"""How a model is divided: whatever the graph, without cycles; free nodes and islands by their rules."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_compiler
from npu_compiler import extract, partition
from npu_compiler.errors import CompileError, IRError
from npu_compiler.op_support import Support
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.partitioning.levels import components, levels
from npu_runtime import DAGExecutor, Device
from tests.partition.mixed import arrays_of, check_plan, run_plan_on_cpu, sides
from tests.support.extraction import Function, run_ir
from tests.support.ir_builder import IRBuilder, Value

SIZE = 6


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """A random graph of square matrices: nodes read any tensors before them; there are views and ops of two results."""
    builder = IRBuilder("random")
    values = [builder.input("x", (SIZE, SIZE)), builder.input("y", (SIZE, SIZE))]
    for _ in range(draw(st.integers(1, 24))):
        one, two = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(["tanh", "add", "mm", "special_i0e", "sort", "view", "split", "relu_"]))
        values += node(builder, kind, one, two)
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique_by=lambda value: value.name))
    return builder.build(*outputs)


def node(builder: IRBuilder, kind: str, one: Value, two: Value) -> tuple[Value, ...]:
    match kind:
        case "add":
            return (builder.call("aten.add.Tensor", one, two),)
        case "mm":
            return (builder.call("aten.tanh.default", builder.call("aten.mm.default", one, two)),)
        case "special_i0e":
            return (builder.call("aten.special_i0e.default", one),)
        case "sort":
            return (builder.call_all("aten.sort.default", one)[0],)
        case "view":
            return (builder.call("aten.transpose.int", one, 0, 1),)
        case "split":
            top, bottom = builder.call_all("aten.split.Tensor", one, SIZE // 2)
            return (builder.call("aten.cat.default", [bottom, top]),)
        case "relu_":
            return (builder.call("aten.relu_.default", builder.call("aten.mul.Tensor", one, two)),)
        case _:
            return (builder.call("aten.tanh.default", one),)


@settings(max_examples=150, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_random_graphs_compute_the_same_in_parts(ir: dict[str, Any], random: Any) -> None:
    """Sides are drawn too, by an answer for each op; the parts then run in PyTorch."""
    refused = {op for op in sorted({node["op_type"] for node in ir["nodes"]}) if random.random() < 0.4}
    inputs = {name: torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).half().float() for name in "xy"}
    expected = run_ir(ir, {}, tuple(tensor.clone() for tensor in inputs.values()))
    for plan in (partition(ir, lambda node: node.op_type not in refused), partition(ir)):
        check_plan(plan, ir)
        results = run_plan_on_cpu(plan, inputs)
        for spec, wanted in zip(plan.outputs, expected, strict=True):
            scale = float(wanted.abs().max()) + 1.0
            error = (results[spec.name].float() - wanted).abs().max() / scale
            assert error < 0.05, (spec.name, plan.report())


@settings(max_examples=8, deadline=None, derandomize=True)  # always the same, so that kernels come from the cache
@given(graphs())
def test_random_graphs_compute_the_same_on_a_device(ir: dict[str, Any]) -> None:
    inputs = {name: torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).half().float() for name in "xy"}
    expected = run_ir(ir, {}, tuple(tensor.clone() for tensor in inputs.values()))
    plan = partition(ir, lambda node: node.op_type not in ("aten.special_i0e.default", "aten.sort.default"))
    results = DAGExecutor(plan, Device("software-metal")).execute(arrays_of(inputs))
    for spec, wanted in zip(plan.outputs, expected, strict=True):
        error = np.abs(np.asarray(results[spec.name]) - wanted.numpy()).max()
        assert error < 0.05 * (float(wanted.abs().max()) + 1.0), plan.report()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 40), max_size=3)), max_size=40))
def test_levels_follow_edges_and_never_mix_sides(nodes: list[tuple[bool, list[int]]]) -> None:
    on_device = [side for side, _ in nodes]
    before = [
        sorted({edge % position for edge in edges} if position else set()) for position, (_, edges) in enumerate(nodes)
    ]
    found = levels(before, on_device)
    for position, edges in enumerate(before):
        for edge in edges:
            assert found[edge] < found[position] or (
                found[edge] == found[position] and on_device[edge] == on_device[position]
            )
    for level in set(found):
        assert len({on_device[i] for i, own in enumerate(found) if own == level}) == 1
    assert sorted(set(found)) == list(range(len(set(found))))
    groups = components(before, found)
    assert all(found[group] == found[i] for i, group in enumerate(groups))


def plan_of(function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> PartitionPlan:
    extraction = extract(Function(function), inputs)
    plan = partition(extraction.ir, **options)
    check_plan(plan, extraction.ir)
    return plan


def place_of(plan: PartitionPlan, node: str) -> str:
    return next(part.device for part in plan.partitions if node in part.nodes)


def reason_of(plan: PartitionPlan, node: str) -> str:
    return next(part.reasons[node] for part in plan.partitions if node in part.reasons)


LARGE = torch.zeros(64, 64)


def test_one_cheap_op_between_two_on_the_cpu_stays_there() -> None:
    """M = 2 · 64² · 2 bytes cross in float16, B / 4 + F / 4 = 2 · 64² · 4 / 4 + 64² / 4."""
    plan = plan_of(lambda x: torch.special.i0e(torch.special.i0e(x) * 2), LARGE)
    assert sides(plan) == ["cpu"]
    assert reason_of(plan, "mul").startswith("moving 16.0 KiB between host and device costs more than it saves")


def test_a_matrix_product_between_two_on_the_cpu_goes_to_the_device() -> None:
    plan = plan_of(lambda x: torch.special.i0e(torch.special.i0e(x) @ x), LARGE)
    assert sides(plan) == ["cpu", "npu", "cpu"]


def test_enough_cheap_ops_go_to_the_device_together() -> None:
    def chain(x: torch.Tensor, count: int) -> torch.Tensor:
        x = torch.special.i0e(x)
        for _ in range(count):
            x = torch.tanh(x)
        result: torch.Tensor = torch.special.i0e(x)
        return result

    assert sides(plan_of(lambda x: chain(x, 1), LARGE)) == ["cpu"]
    assert sides(plan_of(lambda x: chain(x, 2), LARGE)) == ["cpu", "npu", "cpu"]
    half = LARGE.half()  # what is read and written in half the bytes pays half as much
    assert sides(plan_of(lambda x: chain(x, 3), half)) == ["cpu"]
    assert sides(plan_of(lambda x: chain(x, 4), half)) == ["cpu", "npu", "cpu"]


def test_a_cheap_op_beside_other_work_of_the_device_is_no_island() -> None:
    plan = plan_of(lambda x: torch.special.i0e((x @ x) * 2), LARGE)
    assert sides(plan) == ["npu", "cpu"]


def test_an_island_whose_neighbours_leave_is_weighed_again() -> None:
    """Alone, each of the two cheap groups would keep a tensor on the device for the other."""
    plan = plan_of(lambda x: torch.special.i0e(x) * (torch.special.i0e(x * 2) + 1), LARGE)
    assert sides(plan) == ["cpu"]


def test_a_model_that_fits_whole_has_no_islands() -> None:
    assert sides(plan_of(lambda x: x * 2, torch.zeros(4))) == ["npu"]


def test_what_a_group_reads_twice_crosses_once() -> None:
    plan = plan_of(lambda x: (lambda c: (c @ c) @ (c * c))(torch.special.i0e(x)), LARGE)
    assert [(t.tensor, t.nbytes) for t in plan.transfers] == [("special_i0e", 8192), ("matmul_1", 8192)]
    assert plan.bytes_moved == 16384


def test_free_nodes_go_where_their_operand_is() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        on_device = (x @ x).transpose(0, 1).reshape(16, 256)
        on_cpu = torch.special.i0e(on_device).reshape(64, 64).unsqueeze(0).detach().squeeze(0)
        result: torch.Tensor = on_cpu @ x
        return result

    plan = plan_of(function, LARGE)
    assert sides(plan) == ["npu", "cpu", "npu"]
    assert [place_of(plan, name) for name in ("transpose", "reshape")] == ["npu", "npu"]
    assert [place_of(plan, name) for name in ("reshape_1", "unsqueeze", "squeeze")] == ["cpu"] * 3
    assert reason_of(plan, "unsqueeze") == "it costs nothing where its operand is, and 'reshape_1' runs on the CPU"


def test_free_nodes_of_inputs_go_where_they_are_read() -> None:
    plan = plan_of(lambda x: torch.special.i0e(x.transpose(0, 1)) + x.view(64, 64) @ x, LARGE)
    assert place_of(plan, "transpose") == "cpu"
    assert place_of(plan, "view") == "npu"


def test_a_refused_view_is_respected() -> None:
    plan = plan_of(
        lambda x: (x @ x).transpose(0, 1) @ x, LARGE, is_op_supported=lambda node: "transpose" not in node["op_type"]
    )
    assert sides(plan) == ["npu", "cpu", "npu"]
    assert reason_of(plan, "transpose") == "the callback refused it"


def test_a_choice_among_results_is_never_asked_about() -> None:
    asked: list[str] = []

    def callback(node: Any) -> bool:
        asked.append(node.op_type)
        assert node.attrs == node["attrs"]
        return True

    plan = plan_of(lambda x: sum(torch.split(x @ x, 16)), LARGE, is_op_supported=callback)
    assert sides(plan) == ["npu"]
    assert not any("getitem" in op for op in asked)


def test_reasons_name_the_constraint() -> None:
    plan = plan_of(lambda x, n: (torch.special.i0e(x @ x), n.double() * 2, torch.fft.fft(x)), LARGE, LARGE)
    assert reason_of(plan, "special_i0e") == "no definition of this op is registered"
    assert "float64" in reason_of(plan, "mul")
    assert "of at most 1024 points along a dimension" in reason_of(plan, "fft_fft")


def test_a_support_object_carries_its_reason() -> None:
    plan = plan_of(lambda x: x @ x, LARGE, is_op_supported=lambda node: Support(False, "not today"))
    assert reason_of(plan, "matmul") == "not today"


def test_the_project_s_own_callback_sees_the_whole_model() -> None:
    ir = extract(Function(lambda x: torch.special.i0e(x @ x)), (LARGE,)).ir
    assert partition(ir, npu_compiler.is_op_supported) == partition(ir)


def test_callback_and_target_have_to_agree() -> None:
    plan = plan_of(lambda x: torch.special.i0e(x @ x), LARGE, is_op_supported=lambda node: True, target="metal")
    assert sides(plan) == ["npu", "cpu"]
    assert plan.target == "metal"
    alone = plan_of(lambda x: torch.special.i0e(x @ x), LARGE, is_op_supported=lambda node: True)
    assert sides(alone) == ["npu"]
    assert alone.target is None


def test_a_callback_that_fails() -> None:
    def raising(node: Any) -> bool:
        raise KeyError("axis")

    with pytest.raises(CompileError, match=r"node 'matmul' \(aten.matmul.default\), raised KeyError: 'axis'"):
        plan_of(lambda x: x @ x, LARGE, is_op_supported=raising)
    with pytest.raises(CompileError, match=r"node 'matmul' .* returned \(True, 'yes'\), expected True, False"):
        plan_of(lambda x: x @ x, LARGE, is_op_supported=lambda node: (True, "yes"))
    with pytest.raises(CompileError, match="raised AttributeError: a node has no field 'opcode', it has name, op_type"):
        plan_of(lambda x: x @ x, LARGE, is_op_supported=lambda node: node.opcode)


def test_unknown_target() -> None:
    with pytest.raises(CompileError, match="given the target 'tpu', expected one of cuda, metal"):
        plan_of(lambda x: x @ x, LARGE, target="tpu")


def test_ops_of_no_registry_are_carried() -> None:
    builder = IRBuilder("custom")
    x = builder.input("x", (8, 8))
    y = builder.call("aten.mm.default", x, x)
    ir = builder.build(y)
    ir["nodes"].append(
        {
            "name": "magic",
            "op_type": "mylib.magic.default",
            "inputs": [y.to_json()],
            "outputs": [{"name": "magic", "shape": [8, 8], "dtype": "float8_e4m3fn"}],
            "attrs": {"strength": 3, "nested": [[1], "two"]},
        }
    )
    ir["graph_outputs"] = [{"name": "magic", "shape": [8, 8], "dtype": "float8_e4m3fn"}]
    plan = partition(ir)
    assert sides(plan) == ["npu", "cpu"]
    assert plan.partitions[1].ir["nodes"][0]["attrs"] == {"strength": 3, "nested": [[1], "two"]}
    assert sides(partition(ir, lambda node: node.op_type.startswith("mylib."))) == ["cpu", "npu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ir: ir.pop("nodes"), "the IR: given a NoneType as 'nodes', expected a list"),
        (lambda ir: ir["nodes"].append(ir["nodes"][0]), "its output 'mm_0' is made twice"),
        (lambda ir: ir["nodes"][0]["inputs"][0].update(name="z"), "reads the tensor 'z', which no input"),
        (lambda ir: ir["nodes"][0]["outputs"][0].update(shape=["s0", 8]), "given the shape .'s0', 8., expected sizes"),
        (lambda ir: ir["nodes"][0]["outputs"][0].update(dtype="number"), "unknown data type 'number'"),
        (lambda ir: ir["nodes"].append("relu"), "node 1: given 'relu', expected an object with name and op_type"),
        (lambda ir: ir["nodes"][0].update(attrs=[1]), "given a list as 'attrs', expected an object"),
    ],
)
def test_damaged_ir(change: Callable[[dict[str, Any]], object], message: str) -> None:
    builder = IRBuilder("damaged")
    x = builder.input("x", (8, 8))
    ir = builder.build(builder.call("aten.mm.default", x, x))
    change(ir)
    with pytest.raises(IRError, match=message):
        partition(ir)


def test_float32_islands_of_a_half_precision_model_stay_float32() -> None:
    class Angles(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            angle = torch.special.i0e(positions.float())[:, None] @ torch.arange(64)[None].float()
            result: torch.Tensor = x @ self.weight + torch.special.i0e(angle).sin().to(torch.bfloat16)
            return result

    model = Angles().eval()
    plan = partition(extract(model, (torch.zeros(64, 64, dtype=torch.bfloat16), torch.arange(64))).ir)
    kinds = {
        tensor["dtype"]
        for part in plan.partitions
        if part.on_device
        for node in part.ir["nodes"]
        for tensor in node["outputs"]
    }
    assert "float16" not in kinds
    assert "bfloat16" in kinds
    for part in plan.partitions:
        if part.on_device:
            assert npu_compiler.compile(dict(part.ir)).compute_dtype == "bfloat16"


def test_angles_of_a_float32_model_stay_float32_in_every_part() -> None:
    def angles(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = torch.special.i0e(positions[:, None].float() @ x[:1].float()) * 2 + 1 + positions[:, None]
        result: torch.Tensor = (angle * 3 * angle + 1).cos() @ x
        return result

    plan = plan_of(angles, LARGE, torch.arange(64))
    produced = {
        tensor["name"]: tensor["dtype"]
        for part in plan.partitions
        if part.on_device
        for node in part.ir["nodes"]
        for tensor in node["outputs"]
    }
    assert produced["cos"] == "float16"
    assert produced["mul_1"] == "float32"


def test_a_large_model_is_divided_quickly() -> None:
    builder = IRBuilder("large")
    x = builder.input("x", (16, 16))
    mask = builder.input("mask", (16, 16))
    for layer in range(400):
        y = builder.call("aten.mm.default", x, mask)
        y = builder.call("aten.add.Tensor", y, mask)
        y = builder.call("aten.special_i0e.default", y) if layer % 8 == 0 else builder.call("aten.tanh.default", y)
        y = builder.call("aten.transpose.int", y, 0, 1)
        x = builder.call("aten.add.Tensor", y, x)
    ir = builder.build(x)
    started = perf_counter()
    plan = partition(ir)
    seconds = perf_counter() - started
    check_plan(plan, ir)
    assert len(ir["nodes"]) == 2000
    assert sides(plan) == ["npu", "cpu"] * 50 + ["npu"]
    assert seconds < 20  # a wide margin: it tells linear time from quadratic, not one machine from another
