"""Recurrent layers whose weights clusters of blocks hold from the first step to the last.

Blocks of a cluster run at once and reach each other's shared memory, so that a step costs no launch and no way through
device memory; clusters never wait for each other. After persistent RNNs (Diamos and others, 2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.lowering import recurrence_steps as shared
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, traffic_of
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["RECURRENCE_CLUSTER", "Division", "RecurrenceCosts", "divide", "lower_cluster"]

_WARPS = 8
_THREADS = 32 * _WARPS
_REGISTERS = 255 - 96  # of a thread, but for addresses and what the compiler needs
_PART_BYTES = 16 * _THREADS  # of matrices of 16 x 16, one for each warp
_CLUSTERS, _SPLITS, _ROW_SETS = (8, 4, 2, 1), (1, 2, 4, 8), (1, 2, 4)

RECURRENCE_CLUSTER = KernelTemplate(
    "recurrence_cluster",
    params=f"int steps, batch, {shared.STRIDES}",
    macros=f"a_t {shared.FORM_MACROS} UNITS CLUSTER OWN ROW_SETS SPLITS TILES STEPS_K KEPT PAIRED WARPS SHARED_BYTES",
    inputs=shared.INPUTS,
    outputs="out",
    threads=_THREADS,
    shared_bytes=lambda macros: macros["SHARED_BYTES"],
    files="tensor_cores.cuh clusters.cuh recurrence_cell.cuh",
)


@dataclass(frozen=True)
class RecurrenceCosts(FamilyConstants, family="recurrence"):
    """What steps take.

    Attributes:
        product: Clocks of a quarter of a multiprocessor for a product of 16 x 16 by 16 x 8 matrices.
        wait: Clocks until a cluster has exchanged h, beside its arithmetic.
        alone: The same of one block.
        launch: Microseconds of a launch for one step.
    """

    product: int
    wait: int
    alone: int
    launch: float


@dataclass(frozen=True)
class Division:
    """How the work is divided.

    Attributes:
        problem: What is to be computed.
        cluster: Blocks that share the units of a direction.
        row_sets: Rows of the batch of a cluster, in eights.
        splits: Warps of a block that share the columns of its weights.
    """

    problem: Recurrence
    cluster: int
    row_sets: int
    splits: int

    @property
    def own(self) -> int:
        """Units of a block."""
        return ceil_div(ceil_div(self.problem.hidden, self.cluster), 8) * 8

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows of weights of a warp."""
        return ceil_div(ceil_div(self.problem.cell.gates * self.own, 16), _WARPS // self.splits)

    @property
    def steps_k(self) -> int:
        """Tiles of 16 columns of weights of a warp, two at a time."""
        return ceil_div(self.problem.hidden, 32 * self.splits) * 2

    @property
    def parts(self) -> int:
        """Tiles of a warp."""
        return self.tiles * self.steps_k

    @cached_property
    def kept(self) -> int:
        """Tiles of a warp that lie in registers, beside its sums and what its threads hold of gates and states."""
        items = ceil_div(self.own // 2 * 8 * self.row_sets, _THREADS)
        sums, states = self.tiles * self.row_sets * 4, items * (self.problem.cell.gates + 4)
        others = sums + states + self.row_sets * 4 + self.cluster
        return max(1, min(self.parts, (_REGISTERS - others) // 4))

    @property
    def hidden_bytes(self) -> int:
        """Of both buffers of h; see PITCH in the kernel."""
        pitch = ceil_div(self.splits * self.steps_k * 16, 64) * 64 + 8
        return 2 * 8 * self.row_sets * pitch * 2

    @property
    def sum_bytes(self) -> int:
        return _WARPS * self.tiles * 16 * 8 * self.row_sets * 4

    @property
    def shared_bytes(self) -> int:
        return (self.parts - self.kept) * _PART_BYTES + self.hidden_bytes + self.sum_bytes

    @property
    def clusters(self) -> int:
        """Clusters of the launch."""
        return ceil_div(self.problem.batch, 8 * self.row_sets) * self.problem.directions

    def microseconds(self, device: DeviceModel) -> float:
        """What all steps take, and the weights on their way into the blocks."""
        costs = RecurrenceCosts.of(device)
        held = cluster_cores(device)[self.cluster] // self.cluster if self.cluster > 1 else device.cores
        products = self.parts * _WARPS // 4 * self.row_sets * costs.product
        read = (self.parts - self.kept) * _PART_BYTES + _WARPS * self.hidden_bytes // 2 // self.splits
        moved = (read + 2 * self.sum_bytes) // 128
        step = max(products, moved) + (costs.wait if self.cluster > 1 else costs.alone)
        loaded = self.parts * _PART_BYTES // 8
        return ceil_div(self.clusters, held) * device.microseconds(self.problem.steps * step + loaded)


def divide(problem: Recurrence, device: DeviceModel) -> Division | None:
    """The division that takes the least time; None where no cluster holds the weights, or the device has none."""
    if problem.result.dtype not in (FLOAT16, BFLOAT16) or not offers(device, CLUSTERS):
        return None
    return min(_divisions(problem, device), key=lambda each: each.microseconds(device), default=None)


def _divisions(problem: Recurrence, device: DeviceModel) -> Iterator[Division]:
    for cluster in _CLUSTERS:
        for row_sets in _ROW_SETS:
            for splits in _SPLITS:
                division = Division(problem, cluster, row_sets, splits)
                if division.shared_bytes <= device.shared_bytes and division.tiles * row_sets <= 16:
                    yield division


def lower_cluster(division: Division, group: Group, lowering: Lowering) -> KernelCall:
    """One launch for all steps."""
    problem = division.problem
    in_pairs = shared.are_read_in(2, problem) and all(
        problem[name].has_chunks(2) for name in problem.names if name.startswith("gates")
    )
    macros = {
        **shared.form_macros(problem),
        "a_t": CUDA.storage[problem.result.dtype.name],
        "UNITS": problem.hidden,
        "CLUSTER": division.cluster,
        "OWN": division.own,
        "ROW_SETS": division.row_sets,
        "SPLITS": division.splits,
        "TILES": division.tiles,
        "STEPS_K": division.steps_k,
        "KEPT": division.kept,
        "PAIRED": int(in_pairs),
        "WARPS": _WARPS,
        "SHARED_BYTES": division.shared_bytes,
    }
    tiles = division.clusters // problem.directions
    launch = Launch(
        RECURRENCE_CLUSTER,
        grid=(division.cluster * tiles, problem.directions, 1),
        values={"steps": problem.steps, "batch": problem.batch, **shared.strides(problem)},
        macros=macros,
        inputs=shared.bindings(problem),
        outputs={"out": output_argument(group)},
        flops=problem.flops,
        extension=cluster_along_x(division.cluster),
    )
    nbytes = traffic_of(group, lowering.tensors)
    return KERNELS.launch_alone(launch, " + ".join(group.nodes), nbytes, lowering)
