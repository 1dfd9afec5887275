"""`partition`: divides a model into programs for the device and parts for the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from npu_compiler.compiler import compute_dtype
from npu_compiler.errors import CompileError
from npu_compiler.frontend.ir_source import IRSource
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.lowering.target import target_named
from npu_compiler.op_support import Support
from npu_compiler.op_support import is_op_supported as lowers_by_default
from npu_compiler.partitioning.carried_graph import read_carried_graph, without_shared_memory
from npu_compiler.partitioning.companions import Companions, find_companions
from npu_compiler.partitioning.division import Division, divide
from npu_compiler.partitioning.placement import SupportRule
from npu_compiler.partitioning.plan import Partition, PartitionPlan, TransferOp
from npu_compiler.partitioning.pricing import Divided, ledger_of
from npu_compiler.partitioning.sub_ir import SubIRWriter
from npu_compiler.partitioning.support_rules import NodeCallback, callback_rule, target_rule

__all__ = ["Partition", "PartitionPlan", "TransferOp", "partition"]


def partition(
    source: IRSource,
    is_op_supported: NodeCallback | None = None,
    target: str | None = None,
    device: str | None = None,
) -> PartitionPlan:
    """Divides a model between a device and the CPU.

    Every node that the device supports runs there, except where a group does too little to be worth its transfers
    (the rule is in `npu_compiler.partitioning.islands`). Views and no-ops run where their operand is.

    Args:
        source: Path of an IR JSON file; or the IR itself: as a dict, as pytorch-ir's `IR`, or as `extract` gave it. Ops
            that the registry does not know are welcome.
        is_op_supported: Called with each node that computes something: the name of its op, which has the node's fields
            as well, as in ``op in MY_OPS`` or ``op.attrs["dim"]``. Its answer is a bool, or a `Support` that carries
            the reason. Without it, or with `npu_compiler.is_op_supported`, a node is supported where it lowers.
        target: Where nodes have to lower, such as ``metal`` or ``cuda``. With a callback, both have to agree; when
            omitted, the callback alone decides, and without one the target is that of `compile`.
        device: The device of the target that partitions are compiled for, as for `compile`; its default when omitted.

    Raises:
        IRError: The IR is malformed.
        UnsupportedOpError: A change in place that PyTorch refuses too, or of which the IR does not say what it changes.
        CompileError: There is no such target or device, or the callback failed or is none.
    """
    if is_op_supported is not None and not callable(is_op_supported):
        raise CompileError(
            f"given a {type(is_op_supported).__name__} as is_op_supported, expected a function of a node, such as "
            "lambda op: op in MY_OPS; a target's name goes to target="
        )
    if is_op_supported is lowers_by_default:
        is_op_supported = None
    if is_op_supported is None and target is None:
        target = target_named().name
    codegen = target_named(target, device)
    read = read_carried_graph(source)
    carried = without_shared_memory(read)
    graph = carried.graph
    compute = compute_dtype(graph, codegen, None)
    assigned = assign_dtypes(graph, compute)
    device_tensors = assigned.tensors
    rules = [] if target is None else [target_rule(codegen, device_tensors)]
    if is_op_supported is not None:
        rules.insert(0, callback_rule(is_op_supported, carried.raw))
    refused: dict[str, str] = {}
    support = _all_of(rules, refused)
    companions = find_companions(graph, support, is_op_supported is not None)
    device_tensors = companions.device_tensors(graph, device_tensors)
    division = divide(companions.graph, device_tensors, support)
    divided = Divided(companions.graph, device_tensors, support, dict(refused), division, codegen.device)
    attrs = {node.name: node.attrs for node in assigned.nodes}
    writer = SubIRWriter(carried, device_tensors, attrs, compute.name)
    partitions = _partitions(companions, division, writer)
    return PartitionPlan(
        model=graph.name,
        target=target,
        inputs=tuple(graph.tensors[name] for name in graph.inputs),
        outputs=tuple(
            replace(read.graph.tensors[tensor], name=name)
            for name, tensor in zip(read.outputs, read.graph.outputs, strict=True)
        ),
        output_tensors=graph.outputs,
        partitions=partitions,
        transfers=_transfers(graph, partitions, device_tensors),
        weight_keys=carried.weight_keys,
        notes=graph.notes,
        structure=graph.structure,
        compiled_for=device,
        ledger=ledger_of(divided, lambda node, tensors: target_rule(codegen, tensors)(node)),
    )


def _all_of(rules: Sequence[SupportRule], refused: dict[str, str]) -> SupportRule:
    """What all rules say; each node is asked for once, and those that one of them refuses are noted in `refused`."""
    known: dict[str, Support] = {}

    def support(node: OpNode) -> Support:
        if node.name not in known:
            answers = (rule(node) for rule in rules)
            known[node.name] = next((answer for answer in answers if not answer), Support(True))
            if not known[node.name]:
                refused[node.name] = known[node.name].reason
        return known[node.name]

    return support


def _partitions(companions: Companions, division: Division, writer: SubIRWriter) -> tuple[Partition, ...]:
    """One partition for each level, in order; with what goes along."""
    graph = companions.graph
    members: dict[int, list[int]] = {}
    level_of: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    for position, (node, level) in enumerate(zip(graph.nodes, division.levels, strict=True)):
        members.setdefault(level, []).append(position)
        level_of.update(dict.fromkeys(node.outputs, level))
        for name in node.tensors():
            readers.setdefault(name, set()).add(level)
    wanted = set(graph.outputs)
    partitions = []
    for level, positions in sorted(members.items()):
        nodes = [graph.nodes[position] for position in positions]
        read = dict.fromkeys(name for node in nodes for name in node.tensors() if name not in graph.weights)
        inputs = tuple(name for name in read if level_of.get(name) != level)
        made = [name for node in nodes for name in node.outputs]
        outputs = tuple(name for name in made if name in wanted or readers.get(name, set()) - {level})
        on_device = division.placements[positions[0]].on_device
        name = f"{graph.name}.{level}"
        along = companions.of(nodes)
        reasons = {} if on_device else _reasons(graph, positions, division) | _reasons_along(along)
        nodes = along + nodes
        partitions.append(
            Partition(
                index=level,
                device="npu" if on_device else "cpu",
                nodes=tuple(node.name for node in nodes),
                inputs=inputs,
                outputs=outputs,
                ir=writer.write(name, nodes, inputs, outputs, on_device),
                reasons=reasons,
            )
        )
    return tuple(partitions)


def _reasons(graph: IRGraph, positions: Sequence[int], division: Division) -> dict[str, str]:
    return {graph.nodes[position].name: division.placements[position].reason for position in positions}


def _reasons_along(nodes: Sequence[OpNode]) -> dict[str, str]:
    return {node.name: "no input reaches it, and a node on the CPU reads it" for node in nodes}


def _transfers(
    graph: IRGraph, partitions: Sequence[Partition], device_tensors: Mapping[str, TensorSpec]
) -> tuple[TransferOp, ...]:
    """What crosses, by the time at which it is first needed or, towards the host, made."""
    readers: dict[str, list[Partition]] = {}
    for part in partitions:
        for name in part.inputs:
            readers.setdefault(name, []).append(part)
    makers = {name: part for part in partitions for name in part.outputs}
    timed = []
    for name, maker in (*dict.fromkeys(graph.inputs).items(), *makers.items()):
        from_device = maker is not None and maker.on_device
        across = tuple(part.index for part in readers.get(name, ()) if part.on_device != from_device)
        if across or (from_device and name in graph.outputs):
            spec = device_tensors[name]
            nbytes = prod(spec.shape) * spec.dtype.size
            source = None if maker is None else maker.index
            direction = "to_cpu" if from_device else "to_npu"
            when = source if from_device and source is not None else across[0]
            timed.append((when, from_device, TransferOp(name, direction, source, across, nbytes)))
    return tuple(transfer for _, _, transfer in sorted(timed, key=lambda item: item[:2]))
