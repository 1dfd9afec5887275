"""How threads share a product of one row by codes that tensor cores multiply as integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from cuda_compiler.products.coded_tiles import BUNDLE, TILE, CodedTiles
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants

__all__ = ["IntegerRows", "IntegerRowsCosts", "Work", "integer_rows_sizes"]

_CLOSE = 1.02  # what differs less from the quickest is as quick
_BANKS = 16  # bytes between rows that would begin in the same one
_BARRIERS = 16  # of a block, one of which all threads share


@dataclass(frozen=True)
class IntegerRowsCosts(FamilyConstants, family="integer_rows"):
    """What decides how threads share the work.

    Attributes:
        warps, least_warps: Of a block, at the most, and at the least where there is work for them.
        team_warps: Of a block with several teams that take tiles in turns: other numbers were slower. They let two
            blocks share a multiprocessor, or keep the next launch's out.
        shared_bytes: Of a block at the most.
        beside_warps, beside_bytes: Of a block at the most that has all its codes on their way, where blocks of other
            launches can be beside it: it then begins long before its vector is there.
        in_flight: Bytes that all blocks ask for ahead of their vector at the most: what they load then waits for them.
        long_bytes: Of a matrix. Of a shorter one, of which multiprocessors have many tiles each, most can be there
            ahead of the vector.
        paced_bytes: Of a block at the most that has most of a short matrix on its way: what small launches ahead need
            must fit beside it.
        step: Clocks that a step takes a warp.
        tile: What it costs to put the parts of a tile together, in steps.
    """

    warps: int
    least_warps: int
    team_warps: tuple[int, ...]
    shared_bytes: int
    beside_warps: int
    beside_bytes: int
    in_flight: float
    long_bytes: float
    paced_bytes: int
    step: float
    tile: float


@dataclass(frozen=True)
class Work(CodedTiles):
    """What threads share.

    Attributes:
        computed: Numbers of the vector that each block computes.
    """

    computed: int

    @property
    def zero_row(self) -> int:
        """Bytes of a row's zero points."""
        return ceil_div(self.k // self.group * self.zero_bits, 8) if self.group else 0

    @property
    def stage_bytes(self) -> int:
        """Of a step's codes; as in integer_rows_codes.cuh."""
        return TILE * self.step * BUNDLE * self.unit * self.bits // 8

    @property
    def scaled_bytes(self) -> int:
        """Of a tile's scales and zero points in shared memory; as in integer_rows_codes.cuh."""
        row = (self.k // self.group if self.group else 1) * self.scale_bytes
        return TILE * (row + (0 if row % 64 else _BANKS) + self.zero_row)

    def own_tiles(self, device: DeviceModel) -> int:
        """Of a multiprocessor at the most, where each has a block."""
        return ceil_div(self.tiles, min(self.tiles, device.cores))

    @property
    def all_bytes(self) -> int:
        """Of the matrix and what belongs to it."""
        return self.tiles * (ceil_div(self.bundles, self.step) * self.stage_bytes + self.scaled_bytes)


@dataclass(frozen=True)
class IntegerRows:
    """How threads share the work.

    Attributes:
        teams: Sets of warps of a block that have a tile each.
        warps_k: Warps of a team, which share k.
        stages: Steps that each warp has on their way.
        beside: Whether blocks of other launches are to find room beside these.
    """

    teams: int
    warps_k: int
    stages: int
    beside: bool = False

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.warps_k

    def blocks(self, work: Work, device: DeviceModel) -> int:
        """One for each multiprocessor, where there are as many tiles."""
        return min(work.tiles, device.cores)

    def turns(self, work: Work, device: DeviceModel) -> int:
        """Tiles of a team."""
        return ceil_div(work.tiles, self.blocks(work, device) * self.teams)

    def steps(self, work: Work) -> int:
        """Of a warp, for a tile."""
        return ceil_div(ceil_div(work.bundles, self.warps_k), work.step)

    def has_all(self, work: Work, device: DeviceModel) -> bool:
        """Whether all steps are on their way at once."""
        return self.stages == self.turns(work, device) * self.steps(work)

    def holds_tile(self, work: Work, device: DeviceModel) -> bool:
        """Whether these are the steps of one tile: no other follows it."""
        return self.turns(work, device) == 1 and self.has_all(work, device)

    def in_flight(self, work: Work, device: DeviceModel) -> int:
        """Bytes that all blocks have on their way."""
        return self.blocks(work, device) * self.warps * self.stages * work.stage_bytes

    def scaled_tiles(self, work: Work, device: DeviceModel) -> int:
        """Tiles of a team whose scales are at hand or on their way: the present one, and those that codes come of."""
        least = ceil_div(work.bundles // self.warps_k, work.step)
        return min(self.turns(work, device), ceil_div(self.stages, least) + 1)

    def shared_bytes(self, work: Work, device: DeviceModel) -> int:
        """Dynamic shared memory of a block; as in integer_rows.cuh."""
        vector = 2 * (work.k + 64) + work.k // work.unit * 8
        parts = 2 * 4 * self.warps * (TILE + 4)
        scales = self.teams * self.scaled_tiles(work, device) * work.scaled_bytes
        return self.warps * self.stages * work.stage_bytes + scales + vector + parts + 2 * work.computed


def integer_rows_sizes(work: Work, device: DeviceModel) -> IntegerRows | None:
    """Of those that should be about the quickest the ones with the fewest warps; None where nothing fits."""
    costs = IntegerRowsCosts.of(device)

    def clocks(sizes: IntegerRows) -> float:
        """What is left to be done when the vector is there: bytes that are not on their way yet, and all steps."""
        left = max(0, work.all_bytes - sizes.in_flight(work, device)) / device.memory_a_clock
        steps = sizes.turns(work, device) * (sizes.steps(work) + costs.tile)
        return max(left, steps * costs.step)

    def best(ways: list[IntegerRows]) -> IntegerRows | None:
        most = _CLOSE * min(map(clocks, ways), default=0)
        close = (sizes for sizes in ways if clocks(sizes) <= most)
        return min(close, key=lambda sizes: (sizes.warps, -sizes.teams, -sizes.stages), default=None)

    if work.own_tiles(device) >= min(costs.team_warps) and work.all_bytes < costs.long_bytes:
        short = _short_sizes(work, costs, device)
        if short is not None:
            return short
    ways = [*_ways(work, costs, device)]
    found = best(ways)
    leaves_room = partial(_leaves_room, work=work, costs=costs, device=device)
    beside = [sizes for sizes in ways if sizes.warps <= costs.beside_warps and leaves_room(sizes)]
    return best(beside) if beside and found is not None and leaves_room(found) else found


def _leaves_room(sizes: IntegerRows, work: Work, costs: IntegerRowsCosts, device: DeviceModel) -> bool:
    """Whether blocks of other launches can be beside those that have all codes on their way."""
    return sizes.has_all(work, device) and sizes.shared_bytes(work, device) <= costs.beside_bytes


def _short_sizes(work: Work, costs: IntegerRowsCosts, device: DeviceModel) -> IntegerRows | None:
    """Of a short matrix: a warp for each tile that has all of it on its way, else as much as there is room for."""
    steps = ceil_div(work.bundles, work.step)
    held = IntegerRows(work.own_tiles(device), 1, steps, beside=True)
    if held.warps <= costs.beside_warps and _leaves_room(held, work, costs, device):
        return held
    ways = (IntegerRows(costs.least_warps, 1, stages, beside=True) for stages in range(steps, 0, -1))
    return next((sizes for sizes in ways if sizes.shared_bytes(work, device) <= costs.paced_bytes), None)


def _ways(work: Work, costs: IntegerRowsCosts, device: DeviceModel) -> Iterator[IntegerRows]:
    own_tiles = work.own_tiles(device)
    least = min(costs.least_warps, own_tiles * work.bundles)
    for teams in range(1, min(costs.warps, power_of_two(own_tiles)) + 1):
        most = costs.warps // teams if teams < _BARRIERS else 1
        for warps_k in range(1, min(most, work.bundles) + 1):
            one = IntegerRows(teams, warps_k, 1)
            if teams > 1 and one.warps not in costs.team_warps:
                continue
            for stages in range(1, one.turns(work, device) * one.steps(work) + 1):
                found = IntegerRows(teams, warps_k, stages)
                if (
                    found.shared_bytes(work, device) > costs.shared_bytes
                    or found.in_flight(work, device) > costs.in_flight
                ):
                    break
                if found.warps >= least:
                    yield found
