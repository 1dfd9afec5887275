"""From a graph to an execution plan: trace, group, lower, place in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from npu_compiler.codegen.grouping import Group, group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.plan import Argument, Buffer, ExecutionPlan, KernelCall, KernelSource, LibraryCall, Role, Step
from npu_compiler.codegen.target import CodegenTarget, Launch, Library, Lowering
from npu_compiler.dtypes import DType
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.ir import IRGraph
from npu_compiler.layout import BufferSpec
from npu_compiler.memory import Lifetime, plan_arena
from npu_compiler.recipes import WeightRecipe
from npu_compiler.symbolic import OpRefusal, Tensor
from npu_compiler.trace import Trace, TracedTensor, trace_graph

__all__ = ["plan_graph"]


@dataclass(frozen=True)
class _Lowered:
    """A launch with what it is part of."""

    launch: Launch | Library
    group: int


def plan_graph(
    graph: IRGraph, target: CodegenTarget, host_dtypes: Mapping[str, DType], output_names: tuple[str, ...]
) -> tuple[ExecutionPlan, tuple[WeightRecipe, ...]]:
    """Plans one function.

    Args:
        graph: The optimized graph, in the data types of the device.
        target: What to plan for.
        host_dtypes: The data type that the model declares for each input, weight and output.
        output_names: Names that the caller knows the outputs by, in the order of `graph.outputs`.

    Returns:
        The plan, and the recipes of the weights it reads.

    Raises:
        UnsupportedOpError: The target cannot lower a node.
    """
    trace, env = trace_graph(graph, target)
    outputs = _outputs_in_memory(graph, trace, env)
    groups = [g for g in group(trace, outputs) if prod(g.shape)]
    lowering = Lowering(trace.tensors)
    lowered = [_Lowered(launch, i) for i, g in enumerate(groups) for launch in _lower(g, target, lowering, graph)]
    inputs = tuple(_spec(trace.tensors[i], name, host_dtypes[name]) for i, name in enumerate(graph.inputs))
    results = tuple(
        _spec(trace.tensors[index], name, host_dtypes[name]) for index, name in zip(outputs, output_names, strict=True)
    )
    first = len(graph.inputs)
    sources = dict(enumerate(graph.weights, first))
    memory = _Memory(trace.tensors, first, sources, dict(zip(outputs, output_names, strict=True)))
    memory.place(lowered, lowering)
    steps, kernels = memory.steps(lowered)
    recipes = tuple(
        replace(recipe, spec=_spec(trace.tensors[index], name, host_dtypes[name]))
        for index, name in sources.items()
        for recipe in (graph.weights[name],)
        if index in memory.slots
    )
    return ExecutionPlan(tuple(memory.buffers), kernels, steps, inputs, results), recipes


def _spec(tensor: TracedTensor, name: str, host: DType) -> BufferSpec:
    return BufferSpec(name, tensor.dtype, host, tensor.layout)


def _outputs_in_memory(graph: IRGraph, trace: Trace, env: Mapping[str, Tensor]) -> list[int]:
    """The tensor that holds each output; a view, an input, a weight or a repeated output is copied to one of its own."""
    taken: list[int] = []
    for name in graph.outputs:
        ref = env[name].ref
        assert ref is not None
        source = trace.tensors[ref.tensor]
        whole = ref.view == source.view and source.source is not None and ref.tensor not in taken
        if not whole:
            trace.node = f"copy of {name}"
            copied = trace.map(env[name]).ref
            assert copied is not None
            ref = copied
        taken.append(ref.tensor)
    return taken


def _lower(group: Group, target: CodegenTarget, lowering: Lowering, graph: IRGraph) -> list[Launch | Library]:
    try:
        return target.lower(group, lowering)
    except OpRefusal as refusal:
        name = group.anchor.name if group.anchor is not None else group.nodes[-1]
        op = next((node.op for node in graph.nodes if node.name == name), "copy")
        raise UnsupportedOpError(name, op, str(refusal)) from None


class _Memory:
    """Assigns every tensor that a launch binds to a buffer and an offset."""

    def __init__(
        self, tensors: list[TracedTensor], inputs: int, weights: Mapping[int, str], outputs: Mapping[int, str]
    ) -> None:
        self.tensors, self.inputs, self.weights, self.outputs = tensors, inputs, weights, outputs
        self.buffers: list[Buffer] = []
        self.slots: dict[int, tuple[int, int]] = {}

    def place(self, lowered: list[_Lowered], lowering: Lowering) -> None:
        """Declares the buffers of inputs, weights and outputs in use, and shares the arena among everything else."""
        ranges: dict[int, tuple[int, int]] = {}
        for step, item in enumerate(lowered):
            for arg in item.launch.args:
                start, _ = ranges.get(arg.tensor, (step, step))
                ranges[arg.tensor] = (start, step)
        arena = []
        for index in sorted(ranges):
            if index < 0:
                arena.append(Lifetime(index, lowering.scratch_sizes[index], *ranges[index]))
                continue
            tensor = self.tensors[index]
            nbytes = tensor.layout.size * tensor.dtype.size
            if index in self.outputs:
                self._declare(index, Role.OUTPUT, self.outputs[index], nbytes)
            elif index in self.weights:
                self._declare(index, Role.WEIGHT, self.weights[index], nbytes)
            elif index < self.inputs:
                self._declare(index, Role.INPUT, tensor.name, nbytes)
            else:
                arena.append(Lifetime(index, nbytes, *ranges[index]))
        offsets, size = plan_arena(arena)
        if arena:
            self.slots.update({key: (len(self.buffers), offset) for key, offset in offsets.items()})
            self.buffers.append(Buffer(Role.ARENA, "", size))

    def _declare(self, index: int, role: Role, name: str, nbytes: int) -> None:
        self.slots[index] = (len(self.buffers), 0)
        self.buffers.append(Buffer(role, name, nbytes))

    def steps(self, lowered: list[_Lowered]) -> tuple[tuple[Step, ...], tuple[KernelSource, ...]]:
        """The launches with their tensors as buffers and offsets, and the distinct kernels."""
        kernels: dict[tuple[str, str], int] = {}
        sources: list[KernelSource] = []
        steps: list[Step] = []
        for item in lowered:
            launch = item.launch
            args = tuple(self._argument(arg) for arg in launch.args)
            if isinstance(launch, Library):
                steps.append(
                    LibraryCall(launch.label, launch.routine, args, dict(launch.attrs), launch.flops, launch.nbytes)
                )
                continue
            key = (launch.kernel.entry, launch.kernel.text)
            if key not in kernels:
                kernels[key] = len(sources)
                sources.append(launch.kernel)
            steps.append(
                KernelCall(
                    launch.label, kernels[key], args, launch.params, launch.grid, launch.block, launch.flops, launch.nbytes
                )
            )
        return tuple(steps), tuple(sources)

    def _argument(self, arg: TensorArg) -> Argument:
        buffer, base = self.slots[arg.tensor]
        return Argument(buffer, base + arg.offset, arg.writes)
