"""Ops on the CPU give what PyTorch gives, for any op that it knows and however the IR records the arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_ir import IR, IRExecutor
from torch_ir.executor import ExecutionError

from npu_compiler import extract, partition
from npu_compiler.errors import DeviceError, InputError, IRError, UnsupportedOpError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.coded_layers import CodedLinear, CodedWeight
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.partitioning.carried_graph import read_carried_graph
from npu_runtime.aten_call import AtenCall
from npu_runtime.cpu_fallback import CPUProgram
from npu_runtime.host_tensors import to_numpy, to_torch
from tests.partition.mixed import arrays_of
from tests.support.extraction import Function

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
HEADS = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(2))
KEYS = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(3))
VECTOR = torch.rand(6, generator=torch.Generator().manual_seed(4)) + 0.5
INDEX = torch.tensor([2, 0, 3])

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "cumsum": (lambda x: torch.cumsum(x, 1), (X,)),
    "cumsum with a dtype": (lambda x: torch.cumsum(x, 1, dtype=torch.float64), (X,)),
    "topk": (lambda x: torch.topk(x, 3, dim=1, largest=False), (X,)),
    "sort": (lambda x: torch.sort(x, dim=0, descending=True), (X,)),
    "stable sort, keyword only": (lambda x: torch.sort(x, stable=True, dim=1), (X,)),
    "median": (lambda x: torch.median(x, 1), (X,)),
    "complex": (lambda x: torch.fft.ifft(torch.fft.fft(x).exp()).real, (X,)),
    "complex output": (lambda x: torch.fft.rfft(x), (X,)),
    "view as complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, 2)).pow(2).conj().resolve_conj()),
        (X,),
    ),
    "scale after defaults": (lambda q: F.scaled_dot_product_attention(q, q, q, scale=0.3), (HEADS,)),
    "grouped heads": (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), (HEADS, KEYS)),
    "causal, grouped, scaled": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.2, enable_gqa=True),
        (HEADS, KEYS),
    ),
    "mask by name": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m > 0, scale=0.3),
        (HEADS, torch.ones(5, 5)),
    ),
    "batch_norm of three tensors": (lambda x, m, v: F.batch_norm(x, m, v), (IMAGE, torch.rand(3), torch.rand(3) + 0.5)),
    "batch_norm without a bias": (
        lambda x, m, w: F.batch_norm(x, m, m + 1, weight=w),
        (IMAGE, torch.rand(3), torch.rand(3)),
    ),
    "layer_norm with a bias alone": (lambda x, b: F.layer_norm(x, (6,), None, b), (X, VECTOR)),
    "conv without bias": (lambda x, w: F.conv2d(x, w, padding=1), (IMAGE, torch.randn(4, 3, 3, 3))),
    "transposed conv": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        (IMAGE, torch.randn(3, 4, 3, 3)),
    ),
    "clamp by a maximum alone": (lambda x, v: torch.clamp(x, max=v), (X, VECTOR)),
    "index with None": (lambda x, i: x[:, :, i], (IMAGE, INDEX)),
    "index_put": (lambda x, i: torch.index_put(x, (i,), x[:3] * 0, accumulate=True), (X, INDEX)),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), (X, X)),
    "scatter_reduce": (
        lambda x: torch.scatter_reduce(x, 1, torch.zeros(4, 6, dtype=torch.int64), x, "amax", include_self=False),
        (X,),
    ),
    "meshgrid": (lambda v: torch.meshgrid(v, v, indexing="ij"), (VECTOR,)),
    "one_hot": (lambda i: F.one_hot(i, 5), (INDEX,)),
    "creation": (lambda x: x + torch.linspace(-1, 1, 6, dtype=torch.float32), (X,)),
    "infinite attribute": (lambda x: torch.nan_to_num(x.masked_fill(x > 0, float("-inf")), neginf=-5.0), (X,)),
    "rounding mode": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), (X,)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic", align_corners=False), (IMAGE,)),
    "grid_sample": (lambda x: F.grid_sample(x, x.new_zeros(2, 4, 4, 2), align_corners=False), (IMAGE,)),
    "linalg": (lambda x: torch.linalg.svdvals(x), (X,)),
    "bucketize": (lambda x, v: torch.bucketize(x, torch.cumsum(v, 0)), (X, VECTOR)),
    "lstm": (lambda x: torch.nn.LSTM(6, 4)(x)[0] * 0 + 1, (X,)),
    "stack of many": (lambda x: torch.stack([x, x * 2, x * 3], dim=1), (X,)),
    "variance": (lambda x: torch.var_mean(x, dim=1, correction=0), (X,)),
    "conversion": (lambda x: x.to(torch.int32).to(torch.float16), (X * 5,)),
}


def cpu_plan(ir: dict[str, Any]) -> PartitionPlan:
    plan = partition(json.loads(json.dumps(ir)), lambda node: False)
    assert [part.device for part in plan.partitions] in (["cpu"], [])
    return plan


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_torch(name: str) -> None:
    function, inputs = CASES[name]
    torch.manual_seed(0)
    extraction = extract(Function(function), inputs)
    plan = cpu_plan(extraction.ir)
    program = CPUProgram(plan.partitions[0])
    program.load_weights(arrays_of(extraction.weights))
    given = {spec.name: to_numpy(tensor.clone()) for spec, tensor in zip(plan.inputs, inputs, strict=True)}
    results = program.run(given)
    with torch.no_grad():
        expected = function(*(tensor.clone() for tensor in inputs))
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    for tensor, wanted in zip(plan.output_tensors, expected, strict=True):
        torch.testing.assert_close(results[tensor], wanted, rtol=0, atol=0, equal_nan=True)


def bind(op: str, tensors: str, **attrs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Binds letters that stand for tensors."""
    return AtenCall("node", op).bind(list(tensors), attrs)


def test_keyword_arguments_survive_defaults_before_them() -> None:
    """As pytorch-ir records ``scaled_dot_product_attention(q, k, v, scale=0.5)``: nothing between."""
    args, kwargs = bind("aten.scaled_dot_product_attention.default", "qkv", scale=0.5, enable_gqa=True)
    assert args == ["q", "k", "v", None, 0.0, False]
    assert kwargs == {"scale": 0.5, "enable_gqa": True}


def test_absent_tensors_are_not_taken_for_the_next() -> None:
    settings = {"training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
    args, _ = bind("aten.batch_norm.default", "xmv", weight=None, bias=None, **settings)
    assert args[:5] == ["x", None, None, "m", "v"]
    assert bind("aten.conv2d.default", "xw")[0][:3] == ["x", "w", None]
    with pytest.raises(
        IRError, match="2 of weight, bias, running_mean, running_var are absent, and it is not recorded"
    ):
        bind("aten.batch_norm.default", "xmv", **settings)


def test_lists_of_tensors() -> None:
    assert bind("aten.cat.default", "abc", dim=1)[0] == [["a", "b", "c"], 1]
    assert bind("aten.index_put.default", "xiv", _tensor_list_sizes=[1])[0] == ["x", ["i"], "v", False]
    args, _ = bind("aten.index.Tensor", "xi", _tensor_list_sizes=[1], _tensor_list_none_masks=[[True, True, False]])
    assert args == ["x", [None, None, "i"]]


def test_attributes_become_torch_objects() -> None:
    args, kwargs = bind("aten.full.default", "", size=[2], fill_value="inf", dtype="torch.float64", device="meta")
    assert args == [[2], float("inf")]
    assert kwargs == {"dtype": torch.float64, "device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("op", "tensors", "attrs", "message"),
    [
        ("aten.relu.default", "xy", {}, "given 2 tensors, 1 more than its schema takes"),
        ("aten.add.Tensor", "x", {}, "given 1 tensors, its schema needs self, other"),
        ("aten.softmax.int", "x", {}, "its argument 'dim' is missing"),
        ("aten.relu.default", "x", {"slope": 1}, "its schema has no argument 'slope'"),
        ("aten.lstm.input", "abcd", {}, "it has 2 lists of tensors and the sizes of 0 are recorded"),
    ],
)
def test_what_cannot_be_bound(op: str, tensors: str, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(IRError, match=message):
        bind(op, tensors, **attrs)


@pytest.mark.parametrize("op", ["aten.magic.default", "aten.relu.magic", "magic.relu.default", "relu", "<lambda>"])
def test_what_torch_does_not_know(op: str) -> None:
    with pytest.raises(UnsupportedOpError, match="PyTorch has no operator of this name"):
        AtenCall("node", op)


def test_the_executor_s_own_binding_would_lose_arguments() -> None:
    """Why arguments are bound here: should pytorch-ir mend this, its binding can serve."""
    extraction = extract(Function(CASES["scale after defaults"][0]), (HEADS,))
    ir = json.loads(json.dumps(extraction.ir))
    ir["nodes"][0]["attrs"] = {"scale": 0.3}  # as pytorch-ir records it
    (lost,) = IRExecutor(IR.from_dict(ir), weights={}).execute((HEADS,))
    wanted = F.scaled_dot_product_attention(HEADS, HEADS, HEADS, scale=0.3)
    assert not torch.allclose(lost, wanted)
    plan = cpu_plan(ir)
    (kept,) = CPUProgram(plan.partitions[0]).run({plan.inputs[0].name: HEADS}).values()
    torch.testing.assert_close(kept, wanted)


def test_the_executor_s_own_binding_would_shift_absent_tensors() -> None:
    settings = {"training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
    mean, variance = torch.rand(3), torch.rand(3) + 0.5
    extraction = extract(Function(CASES["batch_norm of three tensors"][0]), (IMAGE, mean, variance))
    ir = json.loads(json.dumps(extraction.ir))
    ir["nodes"][-1]["attrs"] = settings  # as pytorch-ir records it
    with pytest.raises(ExecutionError, match="running_mean must be defined"):  # it took them for weight and bias
        IRExecutor(IR.from_dict(ir), weights={}).execute((IMAGE, mean, variance))
    plan = cpu_plan(ir)
    (kept,) = (
        CPUProgram(plan.partitions[0])
        .run(dict(zip((spec.name for spec in plan.inputs), (IMAGE, mean, variance), strict=True)))
        .values()
    )
    torch.testing.assert_close(kept, F.batch_norm(IMAGE, mean, variance))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.uint8, torch.int16, torch.float64])
def test_constants_in_the_ir_keep_their_dtype(kind: torch.dtype) -> None:
    """pytorch-ir reads constants of the types that it does not list as float32."""
    extraction = extract(
        Function(lambda x: torch.cumsum(x, 0) + torch.tensor([1, 2, 3], dtype=kind)), (X[:, :3].to(kind),)
    )
    plan = cpu_plan(extraction.ir)
    assert plan.partitions[0].ir["constants"]
    program = CPUProgram(plan.partitions[0])
    assert not program.weight_names
    (result,) = program.run({plan.inputs[0].name: X[:, :3].to(kind)}).values()
    wanted = torch.cumsum(X[:, :3].to(kind), 0) + torch.tensor([1, 2, 3], dtype=kind)
    assert result.dtype == wanted.dtype
    assert torch.equal(result, wanted)


def test_other_users_of_the_executor_are_left_alone() -> None:
    """pytorch-ir takes an executor of one overload for all others of the op."""
    plan = cpu_plan(extract(Function(lambda x: x.relu() + 1), (X,)).ir)
    CPUProgram(plan.partitions[0])
    from torch_ir.ops import get_execution_fn

    assert get_execution_fn("aten.add.Tensor") is None
    assert get_execution_fn("aten.relu.default") is None


def test_results_share_no_memory_with_inputs() -> None:
    plan = cpu_plan(extract(Function(lambda x: (x.view(-1), x.t(), torch.relu(x))), (X,)).ir)
    x = X.clone().numpy()
    results = CPUProgram(plan.partitions[0]).run({plan.inputs[0].name: x})
    x[:] = 0
    assert all(tensor.abs().max() > 0 for tensor in results.values())


def test_a_failing_op_names_its_node() -> None:
    plan = cpu_plan(extract(Function(torch.linalg.inv), (torch.eye(3),)).ir)
    with pytest.raises(DeviceError, match=r"node 'linalg_inv\w*' \(op: aten.linalg_inv\w*.default\): .*singular"):
        CPUProgram(plan.partitions[0]).run({plan.inputs[0].name: np.zeros((3, 3), np.float32)})


def test_an_index_beyond_its_tensor_names_the_node() -> None:
    plan = cpu_plan(extract(Function(lambda x, i: torch.index_select(x, 0, i)), (X, INDEX)).ir)
    names = [spec.name for spec in plan.inputs]
    with pytest.raises(InputError, match=r"node 'index_select' \(op: aten.index_select.default\): .*out of range"):
        CPUProgram(plan.partitions[0]).run(dict(zip(names, (X.numpy(), np.array([0, 9, 1])), strict=True)))


def test_assertions_on_metadata_hold_already() -> None:
    builder_ir = extract(Function(lambda x: torch.relu(x)), (X,)).ir
    assertion = {
        "name": "check",
        "op_type": "aten._assert_tensor_metadata.default",
        "inputs": builder_ir["nodes"][0]["inputs"],
        "outputs": [],
        "attrs": {"dtype": "float32", "device": "meta", "layout": "strided"},
    }
    plan = cpu_plan(builder_ir | {"nodes": [assertion, *builder_ir["nodes"]]})
    (result,) = CPUProgram(plan.partitions[0]).run({plan.inputs[0].name: X}).values()
    assert torch.equal(result, torch.relu(X))


@pytest.mark.parametrize(
    "kind",
    [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_numpy_and_torch_share_memory(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(12.0).reshape(3, 4) if shape == (3, 4) else torch.full(shape, 1.5)).to(kind)
    array = to_numpy(tensor)
    assert array.dtype.name == str(kind).removeprefix("torch.")
    back = to_torch(array)
    assert back.dtype == kind
    assert back.shape == tensor.shape
    assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("kind", "nbytes"), [("complex64", 8), ("complex128", 16), ("float16", 2), ("uint4", 1)])
def test_a_data_type_that_only_the_cpu_knows_has_its_size(kind: str, nbytes: int) -> None:
    given = {"name": "x", "shape": [2], "dtype": kind}
    graph = read_carried_graph({"graph_inputs": [given], "graph_outputs": [given], "nodes": [], "weights": []})
    assert graph.graph.tensors["x"].dtype.size == nbytes


def test_arrays_that_torch_cannot_write_or_stride() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    shared = to_torch(array)
    assert shared.data_ptr() == array.ctypes.data
    del array
    assert shared.tolist() == [[0, 1, 2], [3, 4, 5]]
    flipped = np.arange(6, dtype=np.float32)[::-1]
    assert to_torch(flipped).tolist() == [5, 4, 3, 2, 1, 0]
    assert to_torch(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]


def test_runs_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    plan = cpu_plan(extract(Function(lambda x: torch.cumsum(torch.sort(x, 1).values * 2, 0)), (X,)).ir)
    program = CPUProgram(replace(plan.partitions[0]))

    def run(factor: int) -> bool:
        given = X * factor
        (result,) = program.run({plan.inputs[0].name: given}).values()
        return torch.equal(result, torch.cumsum(torch.sort(given, 1).values * 2, 0))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(1, 60)))


def test_arguments_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors, lists with and without gaps, keyword arguments and in-place operators that get a copy."""

    def function(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = torch.ops.aten.relu_(x - 1)
        return torch.cat([x, changed, x])[:, i], F.scaled_dot_product_attention(x, x, changed, scale=0.3)

    plan = cpu_plan(extract(Function(function), (X, INDEX)).ir)
    program = CPUProgram(plan.partitions[0])
    monkeypatch.setattr("npu_runtime.aten_call.bind_tensors", lambda *args: pytest.fail("bound once more"))
    names = [spec.name for spec in plan.inputs]
    for scale in (1.0, 2.0):
        results = program.run(dict(zip(names, ((X * scale).numpy(), INDEX.numpy()), strict=True)))
        for tensor, wanted in zip(plan.output_tensors, function(X * scale, INDEX), strict=True):
            torch.testing.assert_close(results[tensor], wanted, rtol=0, atol=0)


def test_codes_become_numbers_on_the_cpu() -> None:
    """The operator of quantised models is no op of PyTorch's own: the CPU's part brings it."""
    generator = np.random.default_rng(0)
    codes, scales = generator.integers(0, 256, (12, 16), np.uint8), generator.random((12, 1), np.float32) + 0.5
    layer = CodedLinear(CodedWeight(CodedMatrix((12, 32), 4, codes, 32, scales, 32, zero=8), torch.float32))
    given = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    extraction = extract(layer.eval(), (given,))
    plan = cpu_plan(extraction.ir)
    program = CPUProgram(plan.partitions[0])
    program.load_weights(arrays_of(extraction.weights))
    (result,) = program.run({plan.inputs[0].name: given}).values()
    torch.testing.assert_close(result, layer(given), rtol=0, atol=0)
    given_to_python = "import sys, npu_runtime.cpu_fallback, torch; torch.ops.npu_codes.dequantize.default"
    assert subprocess.run([sys.executable, "-c", given_to_python], check=False).returncode == 0
