"""Attention under the names of its implementations, whose further results nobody reads."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
import npu_runtime
from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError
from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.support.ir_builder import IRBuilder
from tests.support.running import run_ir

FORMS = [
    ("flash_attention_for_cpu", (0.0, True)),
    ("efficient_attention", (None, False, 0.0, True)),
    ("attention_math", (None, 0.0, True)),
]


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_forms_of_attention_are_one(form: str, options: tuple[object, ...]) -> None:
    builder = IRBuilder()
    shape = (2, 3, 8, 16)
    given = [builder.input(name, shape) for name in "qkv"]
    result, *_ = builder.call_all(f"aten._scaled_dot_product_{form}.default", *given, *options)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).half().double() for name in "qkv"}
    (found,) = run_ir(builder.build(result), tensors, Device("software-metal"))
    q, k, v = tensors.values()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", ["flash_attention", "cudnn_attention", "fused_attention_overrideable"])
def test_forms_that_the_cpu_has_not_lower_where_the_first_result_is_read(form: str) -> None:
    def tensor(name: str) -> dict[str, object]:
        return {"name": name, "shape": [2, 3, 8, 16], "dtype": "float32"}

    node: dict[str, object] = {
        "name": "node",
        "op_type": f"aten._scaled_dot_product_{form}.default",
        "inputs": [*map(tensor, "qkv")],
    }
    node |= {"attrs": {"is_causal": True}, "outputs": [tensor("node_0")]}
    assert npu_compiler.is_op_supported(node)
    support = npu_compiler.is_op_supported(node | {"outputs": [tensor("node_0"), tensor("node_1")]})
    assert not support
    assert "2 outputs are used, 1 are supported" in support.reason


class Capped(torch.nn.Module):
    """Attention whose scores are capped, as models spell it out."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / 2.0) * 2.0 + mask
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


@pytest.mark.parametrize("rows", [1, 5, 150])
def test_capped_scores_are_part_of_attention(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, rows, 16), (2, 3, 40, 16), (2, 3, 40, 16), (1, 1, rows, 40)
    given = tuple(torch.randn(shape, generator=generator).mul(2).half().float() for shape in shapes)
    extraction = npu_compiler.extract(Capped().eval(), given)
    program = npu_compiler.compile(extraction.ir, "metal")
    assert [kernel.entry.split("_")[0] for kernel in program.main.kernels] == ["attention"]
    found = npu_runtime.load(program, device="software-metal")(*given)
    expected = Capped()(*(each.double() for each in given))
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize(("rows", "architecture"), [(1, 90), (5, 80), (150, 70), (150, 90)])
def test_kernels_for_cuda_that_cap_scores_compile(rows: int, architecture: int) -> None:
    try:
        if architecture not in architectures():
            pytest.skip(f"this NVRTC does not compile for {architecture}")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    given = tuple(torch.zeros(shape) for shape in ((2, 3, rows, 64), (2, 3, 400, 64), (2, 3, 400, 64), (rows, 400)))
    plan = npu_compiler.compile(npu_compiler.extract(Capped().eval(), given).ir, "cuda").main
    assert "attention" in {kernel.entry for kernel in plan.kernels}
    check_plan_compiles(plan, architecture)


class Native(torch.nn.Module):
    """PyTorch's fast path, without the weights that it need not give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        given = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
        made: torch.Tensor = torch._native_multi_head_attention(x, x, x, 32, 4, *given, None, False)[0]
        return made


def test_a_fast_path_without_weights_is_one_attention() -> None:
    torch.manual_seed(0)
    model, x = Native().eval(), torch.randn(2, 9, 32)
    extraction = npu_compiler.extract(model, (x,))
    assert "aten._native_multi_head_attention.default" in {node["op_type"] for node in extraction.ir["nodes"]}
    program = npu_compiler.compile(extraction, "metal")
    assert "attention" in {kernel.entry for kernel in program.main.kernels}
    found = npu_runtime.load(program, extraction.weights, device="software-metal")(x)
    expected = model.layer.double()(*[x.double()] * 3)[0]
    torch.testing.assert_close(torch.as_tensor(found).double(), expected, rtol=4e-3, atol=4e-3)
