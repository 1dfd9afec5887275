"""Attention of few rows over keys and values in pages, as in a decode step of many texts: clusters share a text.

How a text is divided depends on its own length alone. Queries, and keys and values that are written to pages, may be
computed by the kernel itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS, architecture
from cuda_compiler.attention.coded_pages import (
    PAGE_CODE_MACROS,
    are_coded_pages,
    loads_coded_pages,
    page_code_macros,
    scale_inputs,
)
from cuda_compiler.attention.codes import ROUNDING_MACROS, rounding_macros
from cuda_compiler.attention.computed import functions_of
from cuda_compiler.attention.decode import DECODE_MACROS, DECODE_PARAMS
from cuda_compiler.attention.mask import MaskBlocks, mask_macros, mask_values
from cuda_compiler.attention.pages import PAGE_MACROS, are_tables_settled, pages
from cuda_compiler.attention.sizes import (
    MAX_ROWS,
    PIECE,
    bindings,
    element_bytes,
    least_depth,
    operand_values,
    padded,
    piece_bytes,
    scale_bytes,
    size_macros,
    suits_warps,
)
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.early_launches import EarlyLaunch, are_settled
from cuda_compiler.packing import CHUNK
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.paging import fresh_rows
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages, InPages
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["ATTENTION_PAGED", "PAGED", "loads_pages", "lower_paged", "suits_fresh"]

PAGED = architecture(80)  # copies in the background, products of either half precision
_MAX_TILES = 4096  # that a block lists, and the pages that they lie in
_PAGE_STEP = 64  # positions that a page has a multiple of
_MAX_PAGE = 1 << 15  # positions of a page, as places of new keys and values are kept
_MAX_NEW_CODES = 4  # new rows of a text, whose numbers and codes lie in shared memory
_MAX_TOKENS = 1024  # whose places each block of threads looks at, where it writes new keys and values itself
_MAX_CLUSTERS = 16  # whose parts of a text the last one puts together
_SIZES = (1, 2, 4, 8)  # of clusters
_CODED_DEPTH = 2  # pieces of codes that a warp has on their way
_RESIDENT = 2  # blocks of a multiprocessor where several share a text
_BUSY = 0.75  # of the multiprocessors
_MANY_WARPS = 11  # of a block that is alone on one of these
_ALONE = 4  # pieces for each warp that one cluster computes sooner than several would put their parts together
_LONG = 128  # pieces for a block of threads where all multiprocessors have one
_BESIDE_BYTES = 16 * 1024  # shared memory of a block of threads beside its pieces

ATTENTION_PAGED = KernelTemplate(
    "attention_paged",
    params=DECODE_PARAMS,
    macros=f"{DECODE_MACROS} RESIDENT KEPT stored_t {PAGE_MACROS}",
    inputs="queries k v k_scales? v_scales? mask sinks? states partial pages",
    threads=lambda macros: 32 * macros["WARPS"],
    shared_bytes=None,
    files=(
        "mask.cuh tensor_cores.cuh attention_blocks.cuh attention_common.cuh attention_warp.cuh "
        "attention_inputs.cuh barriers.cuh clusters.cuh attention_cluster.cuh attention_open.cuh attention_fresh.cuh "
        "attention_pieces.cuh"
    ),
    computed="queries pages",
)

ATTENTION_CODED_PAGES = replace(
    ATTENTION_PAGED,
    macros=f"{ATTENTION_PAGED.macros} {PAGE_CODE_MACROS} {ROUNDING_MACROS}",
    files=(
        "mask.cuh tensor_cores.cuh grouped_codes.cuh float8_codes.cuh attention_blocks.cuh attention_common.cuh "
        "attention_warp.cuh attention_inputs.cuh attention_coded_rows.cuh attention_coded_stages.cuh barriers.cuh "
        "clusters.cuh attention_cluster.cuh attention_open.cuh attention_fresh.cuh attention_coded_pieces.cuh"
    ),
)


def loads_pages(group: Group, position: int, operand: Operand) -> bool:
    """Whether the kernels for attention read keys or values in pages of this size: a block of positions lies in one."""
    problem = group.problem
    if not isinstance(operand, InPages) or not isinstance(problem, Attention):
        return False
    if isinstance(operand, CodedPages) and not loads_coded_pages(problem, operand):
        return False
    if fresh_rows(operand) is not None and not suits_fresh(problem.with_operand(position, operand)):
        return False
    return operand.page % _PAGE_STEP == 0 and operand.page <= _MAX_PAGE and operand.page & (operand.page - 1) == 0


def lower_paged(problem: Attention, around: AnchoredGroup, blocks: MaskBlocks) -> list[CallOption]:
    """One launch for devices with clusters, and one for others; none where the kernel does not suit.

    Args:
        problem: What is to be computed.
        around: The same, with its epilogue and what makes its queries.
        blocks: What each block of the mask does.
    """
    if not isinstance(problem.k, InPages) or not _suits(problem, blocks.positions):
        return []
    device = around.device
    divisions = {CLUSTERS: _divide(problem, blocks.positions, device, offers(device, CLUSTERS))}
    divisions[PAGED] = _divide(problem, blocks.positions, device, False)
    if divisions[CLUSTERS] == divisions[PAGED]:
        del divisions[CLUSTERS]
    return [
        CallOption(requires, (_launch(division, problem, around, blocks),)) for requires, division in divisions.items()
    ]


def _launch(division: _Division, problem: Attention, around: AnchoredGroup, blocks: MaskBlocks) -> KernelCall:
    fresh, tiles, lowering = _fresh(problem), problem.batch * problem.groups, around.lowering
    template, stored = (ATTENTION_CODED_PAGES, "uint8") if are_coded_pages(problem) else (ATTENTION_PAGED, "tile_t")
    kept = tiles * division.kept_floats(problem) * FLOAT32.size
    inputs = bindings(problem, blocks.states, kept, lowering)
    del inputs["q"]
    caches = {"k": inputs["k"], "v": inputs["v"], **scale_inputs(problem)}
    caches = {name: replace(argument, writes=bool(fresh)) for name, argument in caches.items()}
    functions = functions_of(problem, lowering, one_place=True, packs=True, elements=True)
    places = [rows.index for rows in fresh if rows.index is not None]
    early = blocks.ready and are_tables_settled(problem, lowering) and are_settled(places, lowering)
    launch = EarlyLaunch(
        template,
        grid=(division.clusters * division.cluster, 1, tiles),
        values=template.values_among(operand_values(problem, problem.rows)),
        macros={
            **size_macros(problem),
            **division.macros(),
            "OWN_ROWS": problem.rows,
            "K_ROW": problem.k.strides[2],
            "V_ROW": problem.v.strides[2],
            "BLOCK": blocks.positions,
            "TILES": ceil_div(problem.length, blocks.positions),
            "RESULT_TILES": tiles,
            "MASK_HEADS": problem.shared if mask_values(problem, problem.rows)["state_head"] else 1,
            **mask_macros(problem, blocks.positions),
            "EARLY": int(early),
            "FRESH": problem.rows if fresh else 0,
            "KEPT": "" if fresh else "const",
            "stored_t": stored,
            "ELEMENT_BYTES": element_bytes(problem),
            "SCALE_BYTES": scale_bytes(problem),
            **page_code_macros(problem),
            **(rounding_macros(problem.k.kind) if isinstance(problem.k, CodedPages) else {}),
        },
        inputs={**inputs, **caches},
        flops=problem.flops,
        prologues={"queries": replace(functions.prologue, macros=functions.macros), **pages(problem, lowering)},
        shared_bytes=division.warps * division.depth * piece_bytes(problem),
        extension=cluster_along_x(division.cluster),
        hurries=early,
    )
    return around.of_problem(problem.with_operand(0, problem.q.in_memory)).launch(launch, around.pack_size(2))


def _suits(problem: Attention, block: int) -> bool:
    few = ceil_div(problem.length, block) <= _MAX_TILES
    return suits_warps(problem, problem.shared * problem.rows) and few and _PAGE_STEP % block == 0


@dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
        warps: Of a block of threads.
        depth: Pieces that a warp has on their way.
        resident: Blocks of a multiprocessor.
        cluster: Blocks of threads that share the positions of a text.
        clusters: Clusters that do so at the most.
        alone: Pieces that one cluster computes by itself.
        enough: Pieces for another cluster.
    """

    warps: int
    depth: int
    resident: int
    cluster: int
    clusters: int
    alone: int
    enough: int

    def macros(self) -> dict[str, int]:
        """What the kernel's file is told."""
        return {name.upper(): value for name, value in asdict(self).items()}

    def kept_floats(self, problem: Attention) -> int:
        """Numbers that clusters leave in memory for a text and a head of keys; as in attention_cluster.cuh."""
        if self.clusters == 1:
            return 0
        rows = problem.shared * problem.rows
        chunks = rows * padded(problem.value_size) // 4
        return self.clusters * (ceil_div(chunks, self.cluster) * 4 + rows * 2) * self.cluster


def _divide(problem: Attention, block: int, device: DeviceModel, in_clusters: bool) -> _Division:
    """The division, as found by trial on one H200: as few blocks of threads for a text as keep multiprocessors busy.

    All of them run at once, with as many pieces on their way in a multiprocessor. One that is alone there has two for
    each warp, so that one is computed while another arrives; or twice as many warps, where two of a cluster would share
    it.
    """
    coded, least = are_coded_pages(problem), least_depth(problem, problem.shared * problem.rows)
    texts, pieces = problem.batch * problem.groups, ceil_div(problem.length, block) * block // PIECE
    held = {1: device.cores, **(cluster_cores(device) if in_clusters else {})}
    sizes = [n for n in _SIZES if n in held and texts * n <= _RESIDENT * held[n]]
    busy = [n for n in sizes if texts * n >= _BUSY * device.cores]
    cluster = min(busy) if busy else max(sizes, default=1)
    resident = min(ceil_div(texts * cluster, held[cluster]), _RESIDENT + 1)
    many = _MANY_WARPS if busy and not coded else 8
    warps, depth, resident = (many, 2, 1) if resident == 1 else (8, 1, 2) if resident == _RESIDENT else (4, 1, 4)
    depth = max(least, _CODED_DEPTH if coded else depth)
    while warps * depth * piece_bytes(problem) > device.core_shared_bytes // resident - _BESIDE_BYTES and warps > 1:
        warps, depth = (warps, depth // 2) if depth > least else (warps // 2, depth)
    while cluster > 1 and cluster // 2 * warps >= pieces:
        cluster //= 2
    if cluster > 1 and resident == _RESIDENT and not coded:
        cluster, warps, resident = cluster // 2, 2 * warps, 1  # fewer parts to put together
    most = resident * held[cluster] // (texts * cluster)
    alone, enough = (_ALONE * cluster * warps, cluster * warps) if most > 1 else (_LONG * cluster, _LONG * cluster)
    clusters = min(ceil_div(pieces, enough), _MAX_CLUSTERS, most if most > 1 else _MAX_CLUSTERS)
    return _Division(warps, depth, resident, cluster, clusters if pieces > alone else 1, alone, enough)


def suits_fresh(problem: Attention) -> bool:
    """Whether the kernel stores what is new among keys and values: as many rows of each lane as it has queries."""
    fresh = _fresh(problem)
    if problem.shared * problem.rows > MAX_ROWS or problem.causal or problem.batch * problem.rows > _MAX_TOKENS:
        return False
    if problem.rows > _MAX_NEW_CODES and any(isinstance(operand, CodedPages) for operand in (problem.k, problem.v)):
        return False
    copied = problem.k.has_chunks(CHUNK) and problem.v.has_chunks(CHUNK)
    return copied and all(rows.shape[0] == problem.batch * problem.rows for rows in fresh)


def _fresh(problem: Attention) -> list[Group]:
    """New keys and new values, or their codes."""
    found = (fresh_rows(operand) for operand in (problem.k, problem.v))
    return [rows for rows in found if rows is not None]
