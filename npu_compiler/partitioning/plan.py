"""A model divided between device and CPU: its partitions, what crosses between them, and all of it as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from npu_compiler.artifact.describe import counted, format_bytes
from npu_compiler.artifact.output_structure import Structure
from npu_compiler.ir import TensorSpec
from npu_compiler.partitioning.ledger import Ledger, price_text

__all__ = ["Partition", "PartitionPlan", "TransferOp", "cpu_reasons", "direction", "endpoints"]
__all__ += ["op_counts", "side", "summary"]

_OPS_LISTED = 4


@dataclass(frozen=True)
class Partition:
    """Nodes that run together, on one side.

    Attributes:
        index: Its place in `PartitionPlan.partitions`.
        device: ``npu`` or ``cpu``.
        nodes: Names of its nodes, in order. Those that no input reaches may be in several partitions.
        inputs: Tensors that it reads from the caller or from earlier partitions.
        outputs: Tensors that the caller or later partitions read.
        ir: The partition as an IR of its own, which `compile` takes where `device` is ``npu``.
        reasons: For each node on the CPU, why it is there.
    """

    index: int
    device: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ir: Mapping[str, Any] = field(repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def on_device(self) -> bool:
        return self.device == "npu"


@dataclass(frozen=True)
class TransferOp:
    """A tensor that crosses between host and device: once, however many partitions read it there.

    Attributes:
        tensor: Its name.
        direction: ``to_npu`` or ``to_cpu``.
        source: The partition that makes it; None where the caller gives it.
        readers: The partitions on the other side that read it; empty where only the caller does.
        nbytes: Bytes that cross, in the data type of the device, without padding.
    """

    tensor: str
    direction: str
    source: int | None
    readers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PartitionPlan:
    """A model, divided.

    Attributes:
        model: The model's name.
        target: The target it was divided for; None where a callback alone decided.
        inputs: What the caller gives, in the data types that the model declares.
        outputs: What the caller gets, by the names the model declares.
        output_tensors: The tensor that holds each output, in the order of `outputs`.
        partitions: In an order in which they can run.
        transfers: In the order in which they happen.
        weight_keys: Name in the weight file of each weight, by the name that nodes read.
        notes: What was assumed where the IR does not say it.
        structure: How the model nests its outputs; None for the usual way.
        compiled_for: The device of the target that its partitions are compiled for; None for the default.
        ledger: What keeps nodes on the CPU, what that costs, and what would end it.
    """

    model: str
    target: str | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    output_tensors: tuple[str, ...]
    partitions: tuple[Partition, ...]
    transfers: tuple[TransferOp, ...]
    weight_keys: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    structure: Structure | None = None
    compiled_for: str | None = None
    ledger: Ledger = field(default_factory=Ledger, repr=False)

    def __repr__(self) -> str:
        return f"PartitionPlan({summary(self)})"

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between host and device in one run."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def report(self) -> str:
        """The plan as text: partitions, transfers, every node on the CPU with its reason, and the ledger."""
        parts = (_partitions(self), _transfers(self), _reasons(self), price_text(self.ledger), _notes(self))
        return "\n".join([summary(self), *chain.from_iterable(parts)]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """What `report` says, as JSON holds it."""
        return {
            "model": self.model,
            "target": self.target,
            "partitions": [
                {
                    "index": part.index,
                    "device": part.device,
                    "nodes": list(part.nodes),
                    "inputs": list(part.inputs),
                    "outputs": list(part.outputs),
                }
                for part in self.partitions
            ],
            "transfers": [
                {
                    "tensor": transfer.tensor,
                    "direction": transfer.direction,
                    "source": transfer.source,
                    "readers": list(transfer.readers),
                    "bytes": transfer.nbytes,
                }
                for transfer in self.transfers
            ],
            "bytes_moved": self.bytes_moved,
            "on_cpu": self.ledger.to_dict(),
            "notes": list(self.notes),
        }

    def with_measured(self, cpu_milliseconds: Mapping[int, float]) -> PartitionPlan:
        """The plan whose ledger has times that were measured.

        Args:
            cpu_milliseconds: By index of the partition, as `DAGExecutor.cpu_milliseconds` gives them.
        """
        return replace(self, ledger=self.ledger.with_measured(cpu_milliseconds))


def summary(plan: PartitionPlan) -> str:
    """The plan in one line."""
    sides = {side: [p for p in plan.partitions if p.device == side] for side in ("npu", "cpu")}
    nodes = {side: len({name for p in found for name in p.nodes}) for side, found in sides.items()}
    target = f" for {plan.target}" if plan.target else ""
    return (
        f"{plan.model}{target}: {counted(sum(nodes.values()), 'node')}, {nodes['npu']} on the device in "
        f"{counted(len(sides['npu']), 'partition')}, {nodes['cpu']} on the CPU in {len(sides['cpu'])}, "
        f"{format_bytes(plan.bytes_moved)} moved in {counted(len(plan.transfers), 'transfer')}"
    )


def op_counts(partition: Partition) -> str:
    """The ops of a partition, the most frequent first: ``3 aten.add.Tensor, 1 aten.mm.default``."""
    counts = Counter(node["op_type"] for node in partition.ir["nodes"]).most_common()
    listed = [f"{count} {op}" for op, count in counts[:_OPS_LISTED]]
    rest = sum(count for _, count in counts[_OPS_LISTED:])
    return ", ".join(listed + ([counted(rest, "other")] if rest else []))


def side(partition: Partition) -> str:
    """Where a partition runs, in words."""
    return "device" if partition.on_device else "CPU"


def direction(transfer: TransferOp) -> str:
    """Which way a transfer goes, in words."""
    return "to device" if transfer.direction == "to_npu" else "to CPU"


def endpoints(transfer: TransferOp) -> str:
    """Where a transfer leads: ``input -> 1``, ``0 -> 1, 3``, ``2 -> output``."""
    source = "input" if transfer.source is None else str(transfer.source)
    return f"{source} -> {', '.join(map(str, transfer.readers)) or 'output'}"


def _partitions(plan: PartitionPlan) -> Iterator[str]:
    yield f"partitions: {len(plan.partitions)}"
    for part in plan.partitions:
        yield f"  {part.index}: {side(part)}, {counted(len(part.nodes), 'node')} ({op_counts(part)})"
        yield f"     reads {', '.join(part.inputs) or 'nothing'}; gives {', '.join(part.outputs) or 'nothing'}"


def _transfers(plan: PartitionPlan) -> Iterator[str]:
    yield f"transfers: {len(plan.transfers)}, {format_bytes(plan.bytes_moved)}"
    for transfer in plan.transfers:
        yield f"  {direction(transfer)} {transfer.tensor}, {format_bytes(transfer.nbytes)}, {endpoints(transfer)}"


def _reasons(plan: PartitionPlan) -> Iterator[str]:
    on_cpu = len({name for part in plan.partitions if not part.on_device for name in part.nodes})
    yield f"on the CPU: {counted(on_cpu, 'node')}"
    for op, reason, names in cpu_reasons(plan):
        yield f"  {names} ({op}): {reason}"


def _notes(plan: PartitionPlan) -> Iterator[str]:
    if plan.notes:
        yield f"notes: {len(plan.notes)}"
    yield from (f"  {note}" for note in plan.notes)


def cpu_reasons(plan: PartitionPlan) -> list[tuple[str, str, str]]:
    """Op, reason and the names of the nodes that share them, for all nodes on the CPU; in the order of the model."""
    shared: dict[tuple[str, str], dict[str, None]] = {}
    for part in plan.partitions:
        for node in part.ir["nodes"] if not part.on_device else ():
            shared.setdefault((node["op_type"], part.reasons[node["name"]]), {})[node["name"]] = None
    return [(op, reason, ", ".join(names)) for (op, reason), names in shared.items()]
