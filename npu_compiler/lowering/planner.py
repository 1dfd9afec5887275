"""From a graph to an execution plan: trace, group, schedule, lower, place in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_compiler.artifact.plan import ExecutionPlan, Step
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.dtypes import DType
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.graph.tracing import makers_of_numbers, trace_graph
from npu_compiler.ir import IRGraph
from npu_compiler.lowering.activation_codes import keep_codes, with_scales_beside
from npu_compiler.lowering.dequantisation import note_of_stored
from npu_compiler.lowering.grouping import Group, group
from npu_compiler.lowering.loops import in_memory_order
from npu_compiler.lowering.operand_forms import with_operand_forms
from npu_compiler.lowering.placement import Placement
from npu_compiler.lowering.produced import with_produced_operands
from npu_compiler.lowering.repeats import Repeats
from npu_compiler.lowering.row_factors import with_factors_behind
from npu_compiler.lowering.schedule import find_in_place, schedule
from npu_compiler.lowering.sums import with_added_anchors
from npu_compiler.lowering.target import CodegenTarget, Lowering
from npu_compiler.records import changed
from npu_compiler.tensor.layout import BufferSpec, Layout, layout_of
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, Trace
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["plan_graph"]


def plan_graph(
    graph: IRGraph, target: CodegenTarget, host_dtypes: Mapping[str, DType], named_outputs: Mapping[str, DType]
) -> tuple[ExecutionPlan, tuple[WeightRecipe, ...]]:
    """Plans one function.

    Args:
        graph: The optimized graph, in the data types of the device.
        target: What to plan for.
        host_dtypes: The data type that the model declares for each input and weight.
        named_outputs: The names that the caller knows the outputs by, with the data types that the model declares, in
            the order of `graph.outputs`.

    Returns:
        The plan, and the recipes of the weights it reads.

    Raises:
        UnsupportedOpError: The target cannot lower a node.
    """
    trace, env = trace_graph(graph, target)
    outputs = _outputs_in_memory(graph, trace, env)
    stored = [index for index, _ in outputs]
    first_weight = len(graph.inputs)
    weights = dict(enumerate(graph.weights, first_weight))
    in_place = find_in_place(trace, range(first_weight), weights, stored)
    kept = keep_codes(trace, target.loads)
    groups = group(trace, [*stored, *(scales.codes for scales in kept)], in_place.aliases, target.loads)
    groups = with_scales_beside(groups, kept, trace.tensors)
    groups = with_operand_forms(groups, trace.tensors, stored, target.loads)
    groups = with_added_anchors(groups, stored, target.loads)
    groups = with_produced_operands(groups, stored, target.loads)
    groups = with_factors_behind(groups, trace, stored, target.loads)
    numbers = note_of_stored(groups, stored, makers_of_numbers(graph), target.name)
    lowering = Lowering(trace.tensors, target.device)
    repeats = Repeats(lowering)
    for members in schedule(groups, stored, target.shared_elements):
        lowering.emitted += repeats.lower(members, lambda each: _lower(each, target, lowering, graph))
    names = dict(zip(stored, named_outputs, strict=True))
    placement = Placement(trace.tensors, first_weight, weights, names, in_place.aliases)
    steps = placement.place(lowering.emitted, lowering.scratch_sizes)
    plan = ExecutionPlan(
        buffers=tuple(placement.buffers),
        kernels=tuple(lowering.kernels),
        steps=steps,
        inputs=tuple(_spec(trace.tensors[i], name, host_dtypes[name]) for i, name in enumerate(graph.inputs)),
        outputs=tuple(
            _spec(trace.tensors[index], name, host_dtype, layout)
            for (index, layout), (name, host_dtype) in zip(outputs, named_outputs.items(), strict=True)
        ),
        state=tuple((names[index], graph.inputs[source]) for index, source in in_place.state.items()),
        notes=(*graph.notes, *in_place.notes, *numbers),
        checks=tuple(trace.checks),
    )
    recipes = tuple(
        changed(graph.weights[name], spec=_spec(trace.tensors[index], name, host_dtypes[name]))
        for index, name in weights.items()
        if index in placement.slots
    )
    return plan.with_launched_kernels(), recipes


def _spec(tensor: TracedTensor, name: str, host: DType, layout: Layout | None = None) -> BufferSpec:
    kind = tensor.dtype if host.coding is None else host  # kernels see its codes
    return BufferSpec(name, kind, host, layout or tensor.layout)


def _outputs_in_memory(graph: IRGraph, trace: Trace, env: Mapping[str, Tensor]) -> list[tuple[int, Layout]]:
    """The tensor that holds each output, and how the output lies in it.

    An input, a weight, a part of a tensor, or what is an output already, is copied to a tensor of its own.
    """
    taken: dict[int, Layout] = {}
    for name in graph.outputs:
        ref = env[name].placed()
        source = trace.tensors[ref.tensor]
        same = ref.view.same_elements(source.view)
        layout = source.layout if same else layout_of(ref.view.shape, ref.view.strides)
        whole = layout is not None and ref.view.offset == 0 and layout.size == source.layout.size
        if layout is None or not whole or source.source is None or ref.tensor in taken:
            trace.node = f"copy of {name}"
            ref = trace.map(env[name]).placed()
            layout = trace.tensors[ref.tensor].layout
        taken[ref.tensor] = layout
    return list(taken.items())


def _lower(groups: Sequence[Group], target: CodegenTarget, lowering: Lowering, graph: IRGraph) -> list[Step]:
    try:
        for member in groups:
            member.check()
        groups = [*map(in_memory_order, groups)]
        return target.lower(groups[0], lowering) if len(groups) == 1 else target.lower_shared(groups, lowering)
    except OpRefusal as refusal:
        named = groups[0].anchor.name if groups[0].anchor is not None else groups[0].nodes[-1]
        op = next((node.op for node in graph.nodes if node.name == named), "copy")
        raise UnsupportedOpError(named, op, str(refusal)) from None
