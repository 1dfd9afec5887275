"""Attention under the names of its implementations, whose further results nobody reads."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
from npu_runtime import Device
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
