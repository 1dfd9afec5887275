"""A partition plan as text, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from npu_compiler.describe import format_bytes
from npu_compiler.partitioning.islands import Island

if TYPE_CHECKING:
    from npu_compiler.partitioner import Partition, PartitionPlan, TransferOp

__all__ = ["cpu_reasons", "endpoints", "format_report", "island_reason", "op_counts", "summary"]

_OPS_LISTED = 4


def island_reason(island: Island) -> str:
    return (
        f"moving {format_bytes(island.moved)} between host and device costs more than it saves: its group of "
        f"{len(island.nodes)} reads and writes {format_bytes(island.touched)} and does {island.flops} operations"
    )


def format_report(plan: PartitionPlan) -> str:
    return "\n".join([summary(plan), *_partitions(plan), *_transfers(plan), *_reasons(plan)]) + "\n"


def summary(plan: PartitionPlan) -> str:
    """The plan in one line."""
    sides = {side: [p for p in plan.partitions if p.device == side] for side in ("npu", "cpu")}
    nodes = {side: sum(len(p.nodes) for p in found) for side, found in sides.items()}
    target = f" for {plan.target}" if plan.target else ""
    return (
        f"{plan.model}{target}: {_count(sum(nodes.values()), 'node')}, {nodes['npu']} on the device in "
        f"{_count(len(sides['npu']), 'partition')}, {nodes['cpu']} on the CPU in {len(sides['cpu'])}, "
        f"{format_bytes(plan.bytes_moved)} moved in {_count(len(plan.transfers), 'transfer')}"
    )


def op_counts(partition: Partition) -> str:
    """The ops of a partition, the most frequent first: ``3 aten.add.Tensor, 1 aten.mm.default``."""
    counts = Counter(node["op_type"] for node in partition.ir["nodes"]).most_common()
    listed = [f"{count} {op}" for op, count in counts[:_OPS_LISTED]]
    rest = sum(count for _, count in counts[_OPS_LISTED:])
    return ", ".join(listed + ([f"{rest} others"] if rest else []))


def endpoints(transfer: TransferOp) -> str:
    """Where a transfer leads: ``input -> 1``, ``0 -> 1, 3``, ``2 -> output``."""
    source = "input" if transfer.source is None else str(transfer.source)
    return f"{source} -> {', '.join(map(str, transfer.readers)) or 'output'}"


def _partitions(plan: PartitionPlan) -> Iterator[str]:
    yield f"partitions: {len(plan.partitions)}"
    for part in plan.partitions:
        yield f"  {part.index}: {part.device}, {_count(len(part.nodes), 'node')} ({op_counts(part)})"
        yield f"     reads {', '.join(part.inputs) or 'nothing'}; gives {', '.join(part.outputs) or 'nothing'}"


def _transfers(plan: PartitionPlan) -> Iterator[str]:
    yield f"transfers: {len(plan.transfers)}, {format_bytes(plan.bytes_moved)}"
    for transfer in plan.transfers:
        yield f"  {transfer.direction} {transfer.tensor}, {format_bytes(transfer.nbytes)}, {endpoints(transfer)}"


def _reasons(plan: PartitionPlan) -> Iterator[str]:
    on_cpu = sum(len(part.nodes) for part in plan.partitions if not part.on_device)
    yield f"on the CPU: {_count(on_cpu, 'node')}"
    for op, reason, names in cpu_reasons(plan):
        yield f"  {names} ({op}): {reason}"


def cpu_reasons(plan: PartitionPlan) -> list[tuple[str, str, str]]:
    """Op, reason and the names of the nodes that share them, for all nodes on the CPU; in the order of the model."""
    shared: dict[tuple[str, str], list[str]] = {}
    for part in plan.partitions:
        for node in part.ir["nodes"] if not part.on_device else ():
            shared.setdefault((node["op_type"], part.reasons[node["name"]]), []).append(node["name"])
    return [(op, reason, ", ".join(names)) for (op, reason), names in shared.items()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
