"""What no input reaches: computed once, by the compiler or when weights are loaded, as PyTorch computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import npu_compiler
from npu_compiler import extract
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT16, FLOAT32
from npu_compiler.errors import InputError
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.graph.graph_optimizer import optimize
from npu_compiler.ir import IRGraph
from tests.support.extraction import Function
from tests.support.reference_target import Planned, plan_ir


class Parameters(nn.Module):
    """A function of an input and of a module's own tensors."""

    def __init__(self, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def optimized(model: nn.Module, x: torch.Tensor) -> IRGraph:
    return optimize(read_graph(extract(model, (x,)).ir))


def made(graph: IRGraph) -> dict[str, WeightRecipe]:
    """The recipes of tensors that nodes made before, and that are read."""
    read = {name for node in graph.nodes for name in node.tensors()}
    return {name: recipe for name, recipe in graph.weights.items() if name in read and not recipe.is_plain}


def check(model: nn.Module, x: torch.Tensor, rtol: float = 1e-5) -> tuple[IRGraph, Planned]:
    """Compares what a program computes with PyTorch, of numbers in float64."""
    extraction = extract(model, (x,))
    planned = plan_ir(extraction.ir)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in extraction.weights.items()}
    results = planned.run({planned.plan.inputs[0].name: x.double() if x.is_floating_point() else x}, wide)
    with torch.no_grad():
        expected = model(x)
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted.double().numpy(), rtol=rtol, atol=rtol)
    return optimize(read_graph(extraction.ir)), planned


def test_a_mask_that_is_written_into_zeros_is_a_constant() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(6, 6)
        mask[..., :2] = -1e4
        mask[1:, 3] = 2.0
        return (x + mask).softmax(-1)

    graph, planned = check(Function(function), torch.randn(3, 6, 6))
    assert len(planned.plan.steps) == 1
    (recipe,) = made(graph).values()
    expected = np.zeros((6, 6), np.float32)
    expected[:, :2], expected[1:, 3] = -1e4, 2.0
    np.testing.assert_array_equal(recipe.compute(()), expected)
    assert len(recipe.data) == expected.nbytes
    (note,) = graph.notes
    assert "that no input reaches, 144 B: computed once, when the model is compiled" in note


def test_index_arithmetic_on_constants_is_a_constant() -> None:
    """The relative positions of a window, as models with windows compute them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        side = torch.arange(3)
        places = torch.stack([side[:, None].expand(3, 3), side[None].expand(3, 3)]).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0).contiguous()
        apart[:, :, 0] += 2
        apart[:, :, 1] += 2
        apart[:, :, 0] *= 5
        return x[apart.sum(-1).view(-1)]

    graph, planned = check(Function(function), torch.randn(25, 4))
    assert len(graph.nodes) == len(planned.plan.steps) == 1
    assert not planned.plan.checks  # a constant is known to lie inside


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(6),
        lambda x: torch.where(torch.arange(6)[:, None] >= torch.arange(6), x, -1.0),
        lambda x: x * torch.full((6, 6), 0.5).tril(),
        lambda x: x + torch.zeros_like(x),
    ],
)
def test_what_costs_a_kernel_nothing_stays_in_it(function: Any) -> None:
    graph, planned = check(Function(function), torch.randn(6, 6))
    assert not made(graph)
    assert len(planned.plan.steps) == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_running_sums_of_constants_are_constants(dim: int) -> None:
    """As of the positions where a text begins anew, in masks of packed texts."""

    def function(x: torch.Tensor) -> torch.Tensor:
        starts = torch.diff(torch.arange(6) + torch.zeros(4, 6, dtype=torch.int64), dim=1) != 1
        return x[starts.cumsum(dim) + torch.arange(5).cumsum(0)]

    graph, planned = check(Function(function), torch.randn(16, 3))
    assert [node.op for node in graph.nodes] == ["aten.index.Tensor"]
    assert len(planned.plan.steps) == 1


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_reparametrised_weights_are_made_when_weights_are_loaded(parametrize: Any) -> None:
    graph, _ = check(parametrize(nn.Linear(4, 5)).eval(), torch.randn(2, 4))
    assert [node.op for node in graph.nodes] == ["aten.linear.default"]


def test_a_table_that_an_index_of_the_weight_file_reorders_is_made_when_weights_are_loaded() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.table[self.index.view(-1)].view(9, 9, -1)
        return x + bias.permute(2, 0, 1).contiguous().unsqueeze(0)

    model = Parameters(function, table=torch.randn(25, 4), index=torch.randint(-25, 25, (9, 9)))
    graph, planned = check(model, torch.randn(1, 4, 9, 9))
    assert [node.op for node in graph.nodes] == ["aten.add.Tensor"]
    assert len(planned.plan.steps) == 1
    (recipe,) = made(graph).values()
    assert {source.name for source in recipe.inputs} == {"table", "index"}


def test_weights_of_a_direction_and_a_length_are_made_when_weights_are_loaded() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.g * self.v / (self.v * self.v).sum(1, keepdim=True).sqrt())

    graph, planned = check(Parameters(function, v=torch.randn(5, 4), g=torch.rand(5, 1)), torch.randn(2, 3, 4))
    assert [node.op for node in graph.nodes] == ["aten.linear.default"]
    assert len(planned.plan.steps) == 1


def test_a_product_of_weights_is_made_when_weights_are_loaded() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.w + self.a @ self.b * 0.5)

    tensors = {"w": torch.randn(5, 4), "a": torch.randn(5, 2), "b": torch.randn(2, 4)}
    graph, _ = check(Parameters(function, **tensors), torch.randn(3, 4))
    assert [node.op for node in graph.nodes] == ["aten.linear.default"]


def test_a_constant_takes_part_in_what_is_made_of_weights() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.table[torch.tensor([2, 0, 1, 1])]
        return x @ bias.t()

    graph, _ = check(Parameters(function, table=torch.randn(3, 4)), torch.randn(3, 4))
    ((_, recipe),) = made(graph).items()
    assert any(stage.data for stage in recipe.stages)


def test_views_of_weights_and_codes_stay_what_they_are() -> None:
    def function(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = self.codes.to(torch.float32) * self.scale
        return x @ self.w.t(), x @ scaled.t(), x + self.w[1]

    codes = torch.randint(-9, 9, (8, 4), dtype=torch.int8)
    model = Parameters(function, w=torch.randn(5, 4), codes=codes, scale=torch.rand(8, 1))
    graph, _ = check(model, torch.randn(3, 4))
    assert not made(graph)


def test_a_small_tensor_made_of_weights_is_a_weight_also_where_the_device_does_not_hold_what_it_is_made_of() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        normal: torch.Tensor = (x - self.mean) / (self.var**0.5 + 1e-8)
        return normal

    model = Parameters(function, mean=torch.randn(64), var=torch.linspace(1, 3e5, 64))
    extraction = extract(model, (torch.randn(3, 64),))
    graph, _ = check(model, torch.randn(3, 64))
    (recipe,) = made(graph).values()
    assert [source.name for source in recipe.inputs] == ["var"]
    program = npu_compiler.compile(extraction.ir, target="metal")
    tensors = {name: tensor.numpy() for name, tensor in extraction.weights.items()}
    for weight in program.recipes:
        assert np.isfinite(weight.apply([tensors[source.name] for source in weight.inputs])).all()


def test_a_large_constant_is_a_recipe() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(160, 160)
        mask[10:90, 5:60] = 1
        return x + mask

    graph, planned = check(Function(function), torch.randn(160, 160))
    (recipe,) = made(graph).values()
    assert not recipe.inputs
    assert not recipe.data
    assert len(planned.plan.steps) == 1
    program = npu_compiler.compile(extract(Function(function), (torch.randn(160, 160),)).ir, target="metal")
    text = program.describe()
    assert "expressions(" in text
    assert "that no input reaches, 100.0 KiB: computed once, when the model is loaded" in text
    assert CompiledProgram.from_bytes(program.to_bytes()).recipes == program.recipes


def test_repeated_constants_are_stored_once() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        row = torch.zeros(4)
        row[::2] = 3
        return x * row.expand(64, 4)

    graph, _ = check(Function(function), torch.randn(64, 4))
    (recipe,) = made(graph).values()
    assert recipe.spec.shape == (4,)


def test_a_constant_that_half_precision_does_not_hold_stays_what_it_is() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4, 4)
        mask[0] = torch.finfo(torch.float32).min
        return (x + mask).softmax(-1)

    graph, _ = check(Function(function), torch.randn(4, 4))
    (name,) = made(graph)
    assert assign_dtypes(graph, FLOAT16).tensors[name].dtype == FLOAT32


def _written(value: torch.Tensor) -> torch.Tensor:
    """The value, with something in the way that no expression says."""
    result = torch.zeros_like(value)
    result[0:2] = value[0:2]
    result[2:] = value[2:]
    return result


@pytest.mark.parametrize(
    "constant",
    [
        lambda: torch.arange(8, dtype=torch.int32) * 1_000_000_007,
        lambda: torch.arange(8, dtype=torch.uint8) - 3,
        lambda: torch.arange(8).to(torch.float16) / 3 + 1000,
        lambda: (torch.arange(8, dtype=torch.float64) / 3).to(torch.float32),
        lambda: (torch.arange(8, dtype=torch.float32) / 3).to(torch.bfloat16) * 7,
        lambda: (torch.arange(8, dtype=torch.float32) - 3.5).to(torch.int64),
        lambda: torch.arange(-4, 4) > 0,
        lambda: torch.bitwise_and(torch.arange(-4, 4), 5),
        lambda: torch.arange(8, dtype=torch.float32).sqrt() - 1e-3,
    ],
)
def test_constants_have_the_bits_that_pytorch_gives_them(constant: Callable[[], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + _written(constant())

    expected = constant()
    (recipe,) = made(optimized(Function(function), torch.zeros(8, dtype=torch.float32))).values()
    value = torch.from_numpy(np.array(recipe.compute(())).astype(np.float64))
    assert str(recipe.spec.host_dtype) == str(expected.dtype).removeprefix("torch.")
    assert torch.equal(value, expected.double())


def test_an_op_that_asks_for_a_shape_does_not_wait() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(3, 4)
        mask[1:, ::3] = -5
        return x.exp() + mask + torch.zeros_like(x).fill_(2.0)

    graph, planned = check(Function(function), torch.randn(3, 4))
    assert len(planned.plan.steps) == 1
    assert len(made(graph)) == 1


def test_a_constant_index_beyond_its_tensor_is_found_when_the_program_runs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(6, dtype=torch.int64)
        places[::4] = 4
        return x + torch.nn.functional.embedding(places, torch.arange(8.0).reshape(4, 2))[:, 0]

    ir = extract(Function(function), (torch.zeros(6),)).ir
    with pytest.raises(InputError, match="given the index 4"):
        plan_ir(ir).run({ir["graph_inputs"][0]["name"]: torch.zeros(6, dtype=torch.float64)})
