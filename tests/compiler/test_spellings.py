"""However an op is spelled, it takes the same launches."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export
from torch_ir.converter import convert_exported_program

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import plan_ir

Spelled = Callable[[IRBuilder, Value], Value]
CHANNELS = 64


def kernels(ir: Mapping[str, Any], target: str) -> list[str]:
    plan: ExecutionPlan = npu_compiler.compile(ir, target=target).main
    return [plan.kernels[step.kernel].text for step in plan.steps if isinstance(step, KernelCall)]


def weights(builder: IRBuilder, *shapes: tuple[str, tuple[int, ...]]) -> list[Value]:
    return [builder.weight(key, shape) for key, shape in shapes]


def built(spelled: Spelled, *shape: int) -> dict[str, Any]:
    builder = IRBuilder()
    return builder.build(builder.call("aten.relu.default", spelled(builder, builder.input("x", shape)), name="end"))


KERNEL = (("conv.weight", (CHANNELS, CHANNELS, 3, 3)), ("conv.bias", (CHANNELS,)))
NORM = tuple((f"bn.{key}", (CHANNELS,)) for key in ("weight", "bias", "running_mean", "running_var"))


def conv2d(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.conv2d.default", x, *weights(b, *KERNEL), (1, 1), (1, 1), name="conv")


def convolution(b: IRBuilder, x: Value) -> Value:
    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    return b.call("aten.convolution.default", x, *weights(b, *KERNEL), *rest, name="conv")


def same(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.conv2d.padding", x, *weights(b, *KERNEL), (1, 1), "same", name="conv")


def batch_norm(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.batch_norm.default", x, *weights(b, *NORM), False, 0.1, 1e-5, True, name="bn")


def native_batch_norm(b: IRBuilder, x: Value) -> Value:
    return b.call_all("aten.native_batch_norm.default", x, *weights(b, *NORM), False, 0.1, 1e-5, name="bn")[0]


def no_training(b: IRBuilder, x: Value) -> Value:
    op = "aten._native_batch_norm_legit_no_training.default"
    return b.call_all(op, x, *weights(b, *NORM), 0.1, 1e-5, name="bn")[0]


AFFINE = (("ln.weight", (CHANNELS,)), ("ln.bias", (CHANNELS,)))


def layer_norm(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.layer_norm.default", x, (CHANNELS,), *weights(b, *AFFINE), name="ln")


def native_layer_norm(b: IRBuilder, x: Value) -> Value:
    return b.call_all("aten.native_layer_norm.default", x, (CHANNELS,), *weights(b, *AFFINE), 1e-5, name="ln")[0]


def softmax(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.softmax.int", x, -1, name="softmax")


def _softmax(b: IRBuilder, x: Value) -> Value:
    return b.call("aten._softmax.default", x, -1, False, name="softmax")


MATRIX, BIAS = ("fc.weight", (96, CHANNELS)), ("fc.bias", (96,))


def linear(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.linear.default", x, *weights(b, MATRIX, BIAS), name="fc")


def addmm(b: IRBuilder, x: Value) -> Value:
    matrix, bias = weights(b, MATRIX, BIAS)
    rows = b.call("aten.view.default", x, (-1, CHANNELS))
    result = b.call("aten.addmm.default", bias, rows, b.call("aten.permute.default", matrix, (1, 0)))
    return b.call("aten.view.default", result, (*x.meta.shape[:-1], 96), name="fc")


def linear_without_bias(b: IRBuilder, x: Value) -> Value:
    return b.call("aten.linear.default", x, *weights(b, MATRIX), name="fc")


def mm(b: IRBuilder, x: Value) -> Value:
    (matrix,) = weights(b, MATRIX)
    rows = b.call("aten.view.default", x, (-1, CHANNELS))
    result = b.call("aten.mm.default", rows, b.call("aten.t.default", matrix))
    return b.call("aten._unsafe_view.default", result, (*x.meta.shape[:-1], 96), name="fc")


def after(first: Spelled, second: Spelled) -> Spelled:
    return lambda builder, x: second(builder, first(builder, x))


IMAGE, ROWS = (1, CHANNELS, 8, 8), (2, 5, CHANNELS)
PAIRS: dict[str, tuple[Spelled, Spelled, tuple[int, ...]]] = {
    "convolution": (after(conv2d, batch_norm), after(convolution, batch_norm), IMAGE),
    "conv2d.padding": (after(conv2d, batch_norm), after(same, batch_norm), IMAGE),
    "native_batch_norm": (after(conv2d, batch_norm), after(convolution, native_batch_norm), IMAGE),
    "no_training": (after(conv2d, batch_norm), after(convolution, no_training), IMAGE),
    "native_layer_norm": (layer_norm, native_layer_norm, ROWS),
    "_softmax": (softmax, _softmax, ROWS),
    "addmm": (linear, addmm, ROWS),
    "mm": (linear_without_bias, mm, ROWS),
}


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize("name", PAIRS)
def test_either_spelling_gives_the_same_program(name: str, target: str) -> None:
    usual, other, shape = PAIRS[name]
    assert kernels(built(other, *shape), target) == kernels(built(usual, *shape), target)


class Block(nn.Module):
    """A residual block, an attention and a gated product, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(16, 16, 3, padding="same"), nn.BatchNorm2d(16))
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(F.relu(x + self.last(self.conv(x))).flatten(2).transpose(1, 2))
        q, k, v = (projected(y) for projected in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) @ v
        gated: torch.Tensor = F.silu(self.gate(y)) * self.up(y)
        return gated


def test_a_decomposed_model_takes_the_same_launches_and_is_right() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 16, 4, 4)
    launches, wanted = [], model(x)
    for decomposed in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = export(model, (x,))
            exported = exported.run_decompositions() if decomposed else exported
        ir = convert_exported_program(exported, model_name="block").to_dict()
        if decomposed:
            ops = {node["op_type"] for node in ir["nodes"]}
            assert {"aten.convolution.default", "aten.addmm.default", "aten.native_layer_norm.default"} <= ops
        planned = plan_ir(ir)
        launches.append((len(planned.groups), len(kernels(ir, "metal")), len(kernels(ir, "cuda"))))
        given = {name: tensor.detach().double() for name, tensor in {**model.state_dict()}.items()}
        name = ir["graph_inputs"][0]["name"]
        (result,) = planned.run({name: x.double()}, given)
        np.testing.assert_allclose(result, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert launches[0] == launches[1]


def test_passes_ask_for_what_an_op_is_and_not_for_its_name() -> None:
    root = Path(npu_compiler.__file__).parent
    passes = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("ops", "frontend")]
    named = re.compile(
        r"""\bop(\.startswith\(| (==|!=|in|not in) )\(?["']aten\.|^\s+["']aten\.[^"']+["']:""", re.MULTILINE
    )
    assert len(passes) > 50
    assert not [path.name for path in passes if named.search(path.read_text())]
