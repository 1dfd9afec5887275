"""Islands: groups on the device that do too little to be worth the transfers at their borders.

The rule. Let an island move M bytes more between host and device than if it ran on the CPU, and on the CPU read and
write B bytes for F floating-point operations. It stays on the CPU where

    M > B / 4 + F / 4

as on a machine whose link moves 12 GB/s, whose CPU reads and writes 48 GB/s and computes 48 GFLOP/s. So one elementwise
op between two ops of the CPU stays there, a chain of four or a matrix product goes to the device. A tensor counts once,
however many nodes read it; weights do not count, they are uploaded once. Inputs and outputs of the model count, for the
caller holds them on the host. A model that can run on the device as a whole has no islands, and a group with an op that
only the caller's own function knows is never given up: nothing here says what it does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from npu_compiler.artifact.describe import format_bytes
from npu_compiler.ir import IRGraph, TensorSpec
from npu_compiler.ops.registry import definition
from npu_compiler.partitioning.host import HOST_GBS, HOST_GFLOPS, LINK_GBS, flops_of, nbytes_of, touched_by
from npu_compiler.partitioning.placement import is_free

__all__ = ["Island", "find_islands"]


@dataclass
class Island:
    """A connected group of nodes on the device.

    Attributes:
        nodes: Positions of its nodes.
        moved: Bytes that cross between host and device because it is not on the CPU; negative where it saves transfers.
        touched: Bytes that its nodes read and write.
        flops: Floating-point operations of its nodes.
        is_known: Whether the registry knows all of its ops.
    """

    nodes: list[int] = field(default_factory=list)
    moved: int = 0
    touched: int = 0
    flops: int = 0
    is_known: bool = True

    @property
    def is_worth_moving(self) -> bool:
        saved = self.touched / HOST_GBS + self.flops / HOST_GFLOPS
        return self.moved / LINK_GBS <= saved or not self.is_known

    @property
    def reason(self) -> str:
        """Why it is not worth moving."""
        return (
            f"moving {format_bytes(self.moved)} between host and device costs more than it saves: its group of "
            f"{len(self.nodes)} reads and writes {format_bytes(self.touched)} and does {self.flops} operations"
        )


def find_islands(
    graph: IRGraph, device_tensors: Mapping[str, TensorSpec], on_device: Sequence[bool], groups: Sequence[int]
) -> list[Island]:
    """The groups on the device, with what they move and what they do.

    Args:
        graph: The model, in the data types that it declares.
        device_tensors: The model's tensors in the data types of the device.
        on_device: The side of each node.
        groups: For each node a number that the nodes of its group share.
    """
    islands: dict[int, Island] = {}
    for position, node in enumerate(graph.nodes):
        if on_device[position]:
            island = islands.setdefault(groups[position], Island())
            island.nodes.append(position)
            island.is_known &= definition(node.op) is not None
            if not is_free(node):
                island.touched += touched_by(node, graph.tensors)
                island.flops += flops_of(node, graph.tensors)
    borders = _Borders(graph, on_device, groups)
    for group, island in islands.items():
        for name in borders.tensors.get(group, ()):
            island.moved += borders.crossings_saved_on_cpu(name, group) * nbytes_of(device_tensors[name])
    return list(islands.values())


class _Borders:
    """Who makes and who reads each tensor, by group; the CPU and the caller are the group None."""

    def __init__(self, graph: IRGraph, on_device: Sequence[bool], groups: Sequence[int]) -> None:
        def group_of(position: int) -> int | None:
            return groups[position] if on_device[position] else None

        self.makers: dict[str, int | None] = dict.fromkeys(graph.inputs)
        self.readers: dict[str, set[int | None]] = {name: {None} for name in graph.outputs}
        for position, node in enumerate(graph.nodes):
            self.makers.update(dict.fromkeys(node.outputs, group_of(position)))
            for name in node.tensors():
                if name not in graph.weights:
                    self.readers.setdefault(name, set()).add(group_of(position))
        self.tensors: dict[int, set[str]] = {}
        for name, readers in self.readers.items():
            for group in {self.makers.get(name), *readers} if name in self.makers else ():
                if group is not None:
                    self.tensors.setdefault(group, set()).add(name)

    def crossings_saved_on_cpu(self, name: str, group: int) -> int:
        """How many transfers of a tensor less there would be if the group were on the CPU."""
        maker, readers = self.makers[name], self.readers[name]
        moved = {None if reader == group else reader for reader in readers}
        return _crosses(maker, readers) - _crosses(None if maker == group else maker, moved)


def _crosses(maker: int | None, readers: Collection[int | None]) -> bool:
    """Whether a tensor crosses between host and device; one direction is all that a tensor ever takes."""
    return any(reader is not None for reader in readers) if maker is None else None in readers
