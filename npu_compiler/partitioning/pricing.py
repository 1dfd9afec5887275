"""Makes the ledger of a division: who is the cause of each node on the CPU, and what it costs.

Bytes are charged where a tensor crosses for a node's sake alone: to the nodes of the CPU that read what the device
makes, in equal parts, and to the node of the CPU that makes what the device reads. Each byte that crosses is charged
once, or crosses anyway because it is the caller's, so that prices add up. What a node only follows pays for it: views
and choices go with their operand, islands with the refused node that is nearest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.op_support import Support
from npu_compiler.partitioning.division import Division, divide
from npu_compiler.partitioning.host import (
    HOST_GBS,
    HOST_GFLOPS,
    LINK_GBS,
    PARTITION_US,
    TRANSFER_US,
    crossings,
    flops_of,
    nbytes_of,
    touched_by,
)
from npu_compiler.partitioning.ledger import Cause, CPUNode, Ledger, sorted_causes
from npu_compiler.partitioning.placement import SupportRule, is_free
from npu_compiler.partitioning.ways_out import way_out

__all__ = ["Divided", "ledger_of"]

_MOST_ALTERNATIVES = 32  # causes for which it is found out what they alone bring back; each takes another division


@dataclass(frozen=True)
class Divided:
    """A model and how it was divided.

    Attributes:
        graph: The model, in the data types that it declares.
        device_tensors: Its tensors in the data types of the device.
        support: Who was asked.
        refused: Reason of each node that was refused, by name.
        division: What came of it.
        device: The device that partitions are compiled for.
    """

    graph: IRGraph
    device_tensors: Mapping[str, TensorSpec]
    support: SupportRule
    refused: Mapping[str, str]
    division: Division
    device: DeviceModel

    @property
    def on_device(self) -> dict[str, bool]:
        return _sides(self.graph, self.division)


def ledger_of(divided: Divided, lowers: Callable[[OpNode, Mapping[str, TensorSpec]], Support]) -> Ledger:
    """The ledger of a division.

    Args:
        divided: The model and how it was divided.
        lowers: Whether a node lowers with the tensors given.
    """
    on_device = divided.on_device
    if all(on_device.values()):
        return Ledger()
    nodes = {node.name: node for node in divided.graph.nodes}
    priced = _priced(divided, on_device)
    causes_of = _causes(divided, on_device)
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    members: dict[str, list[CPUNode]] = defaultdict(list)
    for name in priced:
        members[causes_of[name]].append(priced[name])
    for name in dict.fromkeys(causes_of[name] for name in priced):
        remedy = way_out(nodes[name], name in divided.refused, divided.device_tensors, lowers)
        groups[nodes[name].op, priced[name].reason, remedy].append(name)
    causes = []
    for count, ((op, reason, remedy), names) in enumerate(groups.items()):
        returns, saves = _alone(divided, on_device, names) if count < _MOST_ALTERNATIVES else (0, 0)
        every = tuple(node for name in names for node in members[name])
        causes.append(Cause(op, reason, remedy, tuple(names), every, returns, saves))
    return Ledger(sorted_causes(causes))


def _sides(graph: IRGraph, division: Division) -> dict[str, bool]:
    return {node.name: placement.on_device for node, placement in zip(graph.nodes, division.placements, strict=True)}


def _priced(divided: Divided, on_device: Mapping[str, bool]) -> dict[str, CPUNode]:
    """Every node on the CPU with its own share, by name."""
    graph, division = divided.graph, divided.division
    nbytes, transfers = _charged(divided, on_device)
    shares = _partition_shares(division)
    priced = {}
    for node, placement, level in zip(graph.nodes, division.placements, division.levels, strict=True):
        if placement.on_device:
            continue
        moving = nbytes[node.name] / LINK_GBS / 1e6 + transfers[node.name] * TRANSFER_US / 1e3 + shares[level] / 1e3
        computing = 0.0 if is_free(node) else _computing_ms(node, divided)
        priced[node.name] = CPUNode(node.name, node.op, placement.reason, level, nbytes[node.name], moving, computing)
    return priced


def _charged(divided: Divided, on_device: Mapping[str, bool]) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes, and transfers or parts of such, that each node on the CPU is charged with, by name."""
    graph = divided.graph
    readers: dict[str, list[str]] = defaultdict(list)
    makers: dict[str, str] = {}
    for node in graph.nodes:
        makers.update(dict.fromkeys(node.outputs, node.name))
        for name in dict.fromkeys(node.tensors()):
            if not on_device[node.name]:
                readers[name].append(node.name)
    nbytes: dict[str, int] = defaultdict(int)
    transfers: dict[str, float] = defaultdict(float)
    for name, to_host in crossings(graph, on_device).items():
        if name in graph.outputs if to_host else name not in makers:
            continue  # the caller's: it crosses anyway
        charged = readers[name] if to_host else [makers[name]]
        size = nbytes_of(divided.device_tensors[name])
        for index, reader in enumerate(charged):
            nbytes[reader] += size // len(charged) + (index < size % len(charged))
            transfers[reader] += 1 / len(charged)
    return nbytes, transfers


def _partition_shares(division: Division) -> dict[int, float]:
    """Microseconds that a node on the CPU pays for there being more than one partition, by its level."""
    on_cpu: dict[int, int] = defaultdict(int)
    for placement, level in zip(division.placements, division.levels, strict=True):
        if not placement.on_device:
            on_cpu[level] += 1
    extra = (len(set(division.levels)) - 1) * PARTITION_US
    return {level: extra / len(on_cpu) / count for level, count in on_cpu.items()}


def _computing_ms(node: OpNode, divided: Divided) -> float:
    tensors = divided.graph.tensors
    on_cpu = touched_by(node, tensors) / HOST_GBS + flops_of(node, tensors) / HOST_GFLOPS
    there = touched_by(node, divided.device_tensors) / divided.device.memory_gbs
    return max(0.0, on_cpu - there) / 1e6


def _causes(divided: Divided, on_device: Mapping[str, bool]) -> dict[str, str]:
    """For each node on the CPU the name of the node that it is there for, breadth first; else itself."""
    graph = divided.graph
    near: dict[str, list[str]] = defaultdict(list)
    makers = {name: node.name for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        for name in node.tensors():
            if name in makers and not on_device[node.name] and not on_device[makers[name]]:
                near[node.name].append(makers[name])
                near[makers[name]].append(node.name)
    roots = divided.refused.keys()
    found = {node.name: node.name for node in graph.nodes if node.name in roots and not on_device[node.name]}
    waiting = deque(found)
    while waiting:
        name = waiting.popleft()
        for other in near[name]:
            if other not in found:
                found[other] = found[name]
                waiting.append(other)
    return {node.name: found.get(node.name, node.name) for node in graph.nodes if not on_device[node.name]}


def _alone(divided: Divided, on_device: Mapping[str, bool], names: Sequence[str]) -> tuple[int, int]:
    """Nodes that run on the device, and bytes that no longer cross, if these nodes were not refused."""
    allowed = set(names)

    def support(node: OpNode) -> Support:
        return Support(True) if node.name in allowed else divided.support(node)

    other = _sides(divided.graph, divide(divided.graph, divided.device_tensors, support))
    returned = sum(other.values()) - sum(on_device.values())
    return max(0, returned), _moved(divided, on_device) - _moved(divided, other)


def _moved(divided: Divided, on_device: Mapping[str, bool]) -> int:
    return sum(nbytes_of(divided.device_tensors[name]) for name in crossings(divided.graph, on_device))
