"""What keeps nodes on the CPU, what each such cause costs, and what would end it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.artifact.describe import counted, format_bytes

__all__ = ["CPUNode", "Cause", "Ledger", "alone_text", "names_text", "price_text", "sorted_causes"]

_NODES_LISTED = 4


@dataclass(frozen=True)
class CPUNode:
    """A node on the CPU.

    Attributes:
        name: Its name.
        op: Its op.
        reason: Why it is there.
        partition: The partition that it is in.
        nbytes: Bytes that cross between host and device because of it: what it reads from the device and what the
            device reads of it, shared with the other nodes of the CPU that read the same. What the caller gives or gets
            crosses anyway and is not among them.
        moving_ms: Milliseconds of those transfers, and its share of what its partition costs beside them.
        computing_ms: Milliseconds that it takes on the CPU, less what it would take on the device.
    """

    name: str
    op: str
    reason: str
    partition: int
    nbytes: int
    moving_ms: float
    computing_ms: float

    @property
    def milliseconds(self) -> float:
        return self.moving_ms + self.computing_ms


@dataclass(frozen=True)
class Cause:
    """Nodes of one op that are on the CPU for one reason of their own, and those that are there because of them.

    Attributes:
        op: The op.
        reason: Why they are there.
        way_out: What would let them run on the device.
        nodes: Names of those nodes.
        all_nodes: They, and the nodes that only follow them.
        returns: How many nodes run on the device if these alone do lower; it may be none where causes stand together.
        saves: Bytes that then no longer cross; below zero where more do.
    """

    op: str
    reason: str
    way_out: str
    nodes: tuple[str, ...]
    all_nodes: tuple[CPUNode, ...]
    returns: int
    saves: int

    @property
    def nbytes(self) -> int:
        return sum(node.nbytes for node in self.all_nodes)

    @property
    def milliseconds(self) -> float:
        return sum(node.milliseconds for node in self.all_nodes)


@dataclass(frozen=True)
class Ledger:
    """All causes, the most costly first.

    Attributes:
        causes: Each node on the CPU belongs to one.
        measured: Whether the time on the CPU was measured, not derived from rates.
    """

    causes: tuple[Cause, ...] = ()
    measured: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that cross because of nodes on the CPU, in one run."""
        return sum(cause.nbytes for cause in self.causes)

    @property
    def milliseconds(self) -> float:
        """What a run takes longer because of nodes on the CPU."""
        return sum(cause.milliseconds for cause in self.causes)

    def with_measured(self, milliseconds: Mapping[int, float]) -> Ledger:
        """The ledger with the time that partitions on the CPU really took, shared among their nodes as before.

        Args:
            milliseconds: By index of the partition, as `DAGExecutor.cpu_milliseconds` gives them.
        """
        derived: dict[int, float] = {}
        count: dict[int, int] = {}
        for cause in self.causes:
            for node in cause.all_nodes:
                derived[node.partition] = derived.get(node.partition, 0.0) + node.computing_ms
                count[node.partition] = count.get(node.partition, 0) + 1

        def measured(node: CPUNode) -> CPUNode:
            if node.partition not in milliseconds:
                return node
            whole = derived[node.partition]
            share = node.computing_ms / whole if whole else 1 / count[node.partition]
            return replace(node, computing_ms=milliseconds[node.partition] * share)

        causes = [replace(cause, all_nodes=tuple(map(measured, cause.all_nodes))) for cause in self.causes]
        return Ledger(sorted_causes(causes), measured=True)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON holds it; bytes and milliseconds of one run."""
        return {
            "bytes": self.nbytes,
            "milliseconds": self.milliseconds,
            "measured": self.measured,
            "causes": [_cause_dict(cause) for cause in self.causes],
        }


def sorted_causes(causes: list[Cause]) -> tuple[Cause, ...]:
    """The most costly first; of equal ones, in the order of the model."""
    return tuple(sorted(causes, key=lambda cause: -cause.milliseconds))


def _cause_dict(cause: Cause) -> dict[str, Any]:
    return {
        "op": cause.op,
        "reason": cause.reason,
        "way_out": cause.way_out,
        "bytes": cause.nbytes,
        "milliseconds": cause.milliseconds,
        "alone": {"nodes_that_return": cause.returns, "bytes_saved": cause.saves},
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "refused": node.name in cause.nodes,
                "reason": node.reason,
                "partition": node.partition,
                "bytes": node.nbytes,
                "milliseconds": node.milliseconds,
            }
            for node in cause.all_nodes
        ],
    }


def price_text(ledger: Ledger) -> Iterator[str]:
    """The ledger as lines."""
    if not ledger.causes:
        return
    how = "measured" if ledger.measured else "estimated"
    yield f"what that costs: {ledger.milliseconds:.3f} ms a run, {how}, and {format_bytes(ledger.nbytes)} that cross"
    for cause in ledger.causes:
        followers = len(cause.all_nodes) - len(cause.nodes)
        beside = f" and {counted(followers, 'node')} with them" if followers else ""
        price = f"{cause.milliseconds:.3f} ms, {format_bytes(cause.nbytes)}"
        yield f"  {price}: {names_text(cause.nodes)} ({cause.op}){beside}"
        yield f"     way out: {cause.way_out}; {alone_text(cause)}"


def names_text(names: tuple[str, ...]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - _NODES_LISTED
    return ", ".join(names[:_NODES_LISTED]) + (f" and {counted(rest, 'other')}" if rest > 0 else "")


def alone_text(cause: Cause) -> str:
    """What comes of it if nothing else changes."""
    if not cause.returns:
        return "alone it brings no node back"
    saved = format_bytes(abs(cause.saves))
    moved = f"saves {saved}" if cause.saves >= 0 else f"moves {saved} more"
    return f"alone it brings {counted(cause.returns, 'node')} back and {moved}"
