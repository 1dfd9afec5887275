"""A target that is numpy: it runs plans as a device does, in float64, and so checks everything but kernels.

Memory is one float64 slot for each byte of a plan's buffers, NaN where nothing was written: what is read before it is
written, or after its place was given to another tensor, shows up in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from npu_compiler.artifact.output_structure import output_names, usual_structure
from npu_compiler.artifact.plan import Argument, ExecutionPlan, KernelCall, KernelSource, Role
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.dtypes import ALL, FLOAT16
from npu_compiler.errors import InputError
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.graph.graph_optimizer import optimize
from npu_compiler.integers import ceil_div
from npu_compiler.ir import TensorSpec
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operand_forms import pairs_columns
from npu_compiler.lowering.planner import plan_graph
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import CodedRows, Computed, Dequantised, GroupedCodes, Produced, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.pooling import Divisor, Pooling
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.problems.scatter import ScatterRows
from npu_compiler.lowering.target import CodegenTarget, Lowering
from npu_compiler.tensor.layout import Layout, channels_last, dense, filter_order
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View
from tests.support.evaluate import IndexFault, evaluate, positions, read_view

__all__ = ["Planned", "ReferenceTarget", "plan_ir"]

Array = NDArray[Any]
_CHANNEL_ALIGNMENT = 4


class ReferenceTarget(CodegenTarget):
    """Channels-last images padded to a few channels, and fusions of every kind that the compiler knows."""

    name = "reference"
    compute_dtypes = ("float16", "bfloat16")
    storage_dtypes = frozenset(kind.name for kind in ALL)
    launch_flops = 0

    def __init__(self) -> None:
        self.groups: list[tuple[Group, tuple[int, ...]]] = []
        self.tensors: Sequence[TracedTensor] = ()

    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        if role == "image":
            return channels_last(shape, ceil_div(shape[1], _CHANNEL_ALIGNMENT) * _CHANNEL_ALIGNMENT)
        return Layout(shape, shape, (*filter_order(shape), 0)) if role == "conv_weight" else dense(shape)

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        if isinstance(operand, CodedRows):
            return isinstance(group.problem, Attention) and operand.fresh is None
        return not isinstance(operand, Produced | Scattered)

    def multiplies_codes(self, image: TensorSpec, weight: TensorSpec, groups: int) -> bool:
        return True

    def lower(self, group: Group, lowering: Lowering) -> list[Any]:
        return [self._lower(part, lowering) for part in group.apart()]

    def _lower(self, group: Group, lowering: Lowering) -> KernelCall:
        self.tensors = lowering.tensors
        reads = tuple(dict.fromkeys((group.output.index, *group.reads())))
        self.groups.append((group, reads))
        args = tuple(Argument(index, writes=index == group.output.index) for index in reads)
        kernel = lowering.kernel(KernelSource("reference", str(len(self.groups) - 1)))
        return KernelCall(" + ".join(group.nodes), kernel, args, b"", (1, 1, 1), (1, 1, 1))


class Planned:
    """A plan for the reference target, ready to run.

    Attributes:
        plan: The plan.
        recipes: Recipes of its weights.
        groups: What each step computes.
    """

    def __init__(self, plan: ExecutionPlan, recipes: tuple[WeightRecipe, ...], target: ReferenceTarget) -> None:
        self.plan, self.recipes, self._target = plan, recipes, target
        self._steps = [step for step in plan.steps if isinstance(step, KernelCall)]
        numbers = [int(plan.kernels[step.kernel].text) for step in self._steps]
        self._work = [target.groups[number] for number in numbers]
        self.groups = [group for group, _ in self._work]

    def run(self, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor] | None = None) -> list[Array]:
        """The outputs, in order; floating point in float64.

        Raises:
            InputError: An index lies beyond its tensor.
        """
        memory = [np.full(buffer.nbytes, np.nan) for buffer in self.plan.buffers]
        by_name = {(buffer.role, buffer.name): i for i, buffer in enumerate(self.plan.buffers)}
        for spec in self.plan.inputs:
            if (Role.INPUT, spec.name) in by_name:
                place = memory[by_name[Role.INPUT, spec.name]]
                place[positions(View(spec.shape, spec.layout.strides)) * spec.dtype.size] = inputs[spec.name].numpy()
        for recipe in self.recipes:
            place = memory[by_name[Role.WEIGHT, recipe.spec.name]]
            value = recipe.compute([(weights or {})[source.name].numpy() for source in recipe.inputs])
            place[positions(View(recipe.spec.shape, recipe.spec.layout.strides)) * recipe.spec.dtype.size] = value
        for step, (group, tensors) in zip(self._steps, self._work, strict=True):
            try:
                self._run(group, step, tensors, memory)
            except IndexFault as fault:
                names = [spec.name for spec in self.plan.inputs]
                refusal = self.plan.checks[fault.check].refusal(fault.element, fault.value, names)
                raise InputError(refusal) from None
        state = dict(self.plan.state)
        results = []
        for spec in self.plan.outputs:
            key = (Role.INPUT, state[spec.name]) if spec.name in state else (Role.OUTPUT, spec.name)
            flat = memory[by_name[key]] if key in by_name else np.empty(0)
            where = positions(View(spec.shape, spec.layout.strides)) * spec.dtype.size
            results.append(read_view(flat, where))
        return results

    def _run(self, group: Group, step: KernelCall, tensors: tuple[int, ...], memory: list[Array]) -> None:
        own: dict[int, Array] = {}
        places = dict(zip(tensors, step.args, strict=True))

        def buffer(index: int) -> Array:
            if index in own:
                return own[index]
            tensor, place = self._target.tensors[index], places[index]
            size, end = tensor.dtype.size, place.offset + tensor.layout.size * tensor.dtype.size
            flat = memory[place.buffer][place.offset : end : size]
            return flat if tensor.dtype.is_float else np.nan_to_num(flat).astype(tensor.dtype.numpy)

        if group.problem is not None:
            result = _solve(group.problem, buffer)
            if group.added is not None:
                result = result + _solve(group.added.problem, buffer)
            tensor = group.problem.result
            own[tensor.index] = np.full(tensor.layout.size, np.nan)
            own[tensor.index][positions(tensor.view)] = _placed(result, tensor.shape)
        value = evaluate(group.expr, group.shape, buffer)
        where = positions(group.view)
        if group.index is not None:
            where = where + evaluate(group.index, group.shape, buffer) * group.index_stride
        place, size = places[group.output.index], group.output.dtype.size
        memory[place.buffer][place.offset + where * size] = value


def _placed(result: Array, shape: tuple[int, ...]) -> Array:
    """The result of a problem of images as that of lines or volumes: pixels [N, ...] in order, of each its channels."""
    if result.ndim == len(shape):
        return result
    return np.moveaxis(np.moveaxis(result, 1, -1).reshape((shape[0], *shape[2:], shape[1])), -1, 1)


def _solve(problem: Problem, buffer: Any) -> Array:
    operands = []
    for operand in problem.operands:
        if isinstance(operand, CodedRows):
            operand = operand.numbers
        if isinstance(operand, Computed | Dequantised | GroupedCodes):
            value = evaluate(operand.expr, operand.shape, buffer)
        else:
            value = read_view(buffer(operand.tensor.index), positions(operand.view))
        operands.append(torch.tensor(value))
    result: torch.Tensor = _PROBLEMS[type(problem)](problem, *operands)
    return result.numpy()


def _matmul(product: Product, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def _pool(pool: Pooling, x: torch.Tensor) -> torch.Tensor:
    if pool.adaptive:
        adaptive = F.adaptive_max_pool2d if pool.maximum else F.adaptive_avg_pool2d
        return adaptive(x, (pool.shape[2], pool.shape[3]))
    window = (pool.windows.kernel, pool.windows.stride, pool.windows.padding)
    if pool.maximum:
        return F.max_pool2d(x if x.is_floating_point() else x.float(), *window, pool.windows.dilation)
    divisor = 1 if pool.divisor is Divisor.ONE else None
    return F.avg_pool2d(x, *window, count_include_pad=pool.divisor is Divisor.PADDED, divisor_override=divisor)


def _conv(conv: Convolution, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = x.double(), w.double()  # sums of codes do not wrap
    windows, around = conv.windows, list[int]()
    for axis in (1, 0):  # what windows reach beyond the image on either side
        before = windows.padding[axis]
        around += [before, windows.span(axis, conv.shape[2 + axis]) - conv.image.shape[2 + axis] - before]
    return F.conv2d(F.pad(x, around, value=conv.outside), w, None, windows.stride, 0, windows.dilation, conv.groups)


def _attend(attention: Attention, *operands: torch.Tensor) -> torch.Tensor:
    query, key, value, *mask = operands
    sinks = mask.pop() if attention.has_sinks else None
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    added = mask[0].repeat(len(query) // max(1, len(mask[0])), 1, 1, 1) if mask else None
    causal, scale = attention.causal, attention.scale
    if sinks is not None:
        scores = query @ keys.mT * scale + (0 if added is None else added)
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ values
    if attention.cap:
        scores = torch.tanh(query @ keys.mT * (scale / attention.cap)) * attention.cap
        return torch.softmax(scores if added is None else scores + added, -1) @ values
    return F.scaled_dot_product_attention(query, keys, values, added, 0.0, causal, scale=scale)


def _combine(scatter: ScatterRows, index: torch.Tensor, values: torch.Tensor, *base: torch.Tensor) -> torch.Tensor:
    start = base[0] if base else torch.full(scatter.shape, scatter.fill, dtype=values.dtype)
    named = (index >= 0) & (index < scatter.shape[1])
    at = index[named].long()[None, :, None].expand(values.shape[0], -1, values.shape[2])
    return start.scatter_reduce(1, at, values[:, named], scatter.how, include_self=scatter.include_self)


_PROBLEMS: Mapping[type[Problem], Callable[..., torch.Tensor]] = {
    Product: _matmul,
    Convolution: _conv,
    Pooling: _pool,
    Attention: _attend,
    ScatterRows: _combine,
}


def plan_ir(ir: Mapping[str, Any], target: ReferenceTarget | None = None) -> Planned:
    """Compiles an IR for the reference target, through all passes."""
    target = target or ReferenceTarget()
    graph = read_graph(ir)
    pairs = pairs_columns(target, target.loads)
    optimized = assign_dtypes(optimize(graph, pairs, target.launch_flops, target.multiplies_codes), FLOAT16).verify()
    hosts = {name: spec.dtype for name, spec in {**graph.tensors, **optimized.tensors}.items()}
    hosts.update({name: recipe.spec.host_dtype for name, recipe in optimized.weights.items()})
    names = output_names(usual_structure(len(graph.outputs)), graph.outputs)
    outputs = {name: hosts[tensor] for name, tensor in zip(names, graph.outputs, strict=True)}
    plan, recipes = plan_graph(optimized, target, hosts, outputs)
    return Planned(plan, recipes, target)
