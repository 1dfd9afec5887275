"""From a graph to an execution plan: trace, group, lower, place in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from npu_compiler.codegen.grouping import Group, group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.plan import Argument, Buffer, ExecutionPlan, KernelCall, KernelSource, LibraryCall, Role, Step
from npu_compiler.codegen.target import CodegenTarget, Launch, Library, Lowering
from npu_compiler.dtypes import DType
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.ir import IRGraph
from npu_compiler.layout import BufferSpec, Layout, layout_of
from npu_compiler.memory import Lifetime, plan_arena
from npu_compiler.recipes import WeightRecipe
from npu_compiler.symbolic import OpRefusal, Tensor
from npu_compiler.trace import Trace, TracedTensor, trace_graph

__all__ = ["plan_graph"]


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
    groups = [g for g in group(trace, [index for index, _ in outputs]) if prod(g.shape)]
    lowering = Lowering(trace.tensors)
    launches = [launch for g in groups for launch in _lower(g, target, lowering, graph)]
    inputs = tuple(_spec(trace.tensors[i], name, host_dtypes[name]) for i, name in enumerate(graph.inputs))
    results = tuple(
        BufferSpec(name, trace.tensors[index].dtype, host_dtypes[name], layout)
        for (index, layout), name in zip(outputs, output_names, strict=True)
    )
    first = len(graph.inputs)
    sources = dict(enumerate(graph.weights, first))
    names = {index: name for (index, _), name in zip(outputs, output_names, strict=True)}
    memory = _Memory(trace.tensors, first, sources, names)
    memory.place(launches, lowering)
    steps, kernels = memory.steps(launches)
    recipes = tuple(
        replace(recipe, spec=_spec(trace.tensors[index], name, host_dtypes[name]))
        for index, name in sources.items()
        for recipe in (graph.weights[name],)
        if index in memory.slots
    )
    return ExecutionPlan(tuple(memory.buffers), kernels, steps, inputs, results), recipes


def _spec(tensor: TracedTensor, name: str, host: DType) -> BufferSpec:
    return BufferSpec(name, tensor.dtype, host, tensor.layout)


def _outputs_in_memory(graph: IRGraph, trace: Trace, env: Mapping[str, Tensor]) -> list[tuple[int, Layout]]:
    """The tensor that holds each output, and how the output lies in it.

    An input, a weight, a part of a tensor, or what is an output already, is copied to a tensor of its own.
    """
    taken: dict[int, Layout] = {}
    for name in graph.outputs:
        ref = env[name].ref
        assert ref is not None
        source = trace.tensors[ref.tensor]
        layout = source.layout if ref.view.same_elements(source.view) else layout_of(ref.view.shape, ref.view.strides)
        whole = layout is not None and ref.view.offset == 0 and layout.size == source.layout.size
        if layout is None or not whole or source.source is None or ref.tensor in taken:
            trace.node = f"copy of {name}"
            copied = trace.map(env[name]).ref
            assert copied is not None
            ref, layout = copied, trace.tensors[copied.tensor].layout
        taken[ref.tensor] = layout
    return list(taken.items())


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

    def place(self, launches: list[Launch | Library], lowering: Lowering) -> None:
        """Declares the buffers of inputs, weights and outputs in use, and shares the arena among everything else."""
        ranges: dict[int, tuple[int, int]] = {}
        for step, launch in enumerate(launches):
            for arg in launch.args:
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

    def steps(self, launches: list[Launch | Library]) -> tuple[tuple[Step, ...], tuple[KernelSource, ...]]:
        """The launches with their tensors as buffers and offsets, and the distinct kernels."""
        kernels: dict[tuple[str, str], int] = {}
        sources: list[KernelSource] = []
        steps: list[Step] = []
        for launch in launches:
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
                    launch.label,
                    kernels[key],
                    args,
                    launch.params,
                    launch.grid,
                    launch.block,
                    launch.flops,
                    launch.nbytes,
                    launch.shared_bytes,
                )
            )
        return tuple(steps), tuple(sources)

    def _argument(self, arg: TensorArg) -> Argument:
        buffer, base = self.slots[arg.tensor]
        return Argument(buffer, base + arg.offset, arg.writes)
