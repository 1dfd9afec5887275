"""Lowers matrix products: tensor cores, a parallel reduction for a few rows, or plain arithmetic for what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from cuda_compiler.anchors import AnchoredGroup, anchor_launch
from cuda_compiler.artifact.vocabulary import LIBRARY, LIBRARY_MATMUL, WARPGROUPS
from cuda_compiler.dialect import CUDA
from cuda_compiler.products.bulk import bulk_options, lower_bulk, suits_bulk
from cuda_compiler.products.byte_products import Bytes, bulk_byte_tilings, bytes_of, in_pairs
from cuda_compiler.products.codes import CODE_MACROS, code_function
from cuda_compiler.products.few_codes import computes_beside_codes, few_codes_options
from cuda_compiler.products.few_rows import computes_few_rows, few_rows_options, is_quicker
from cuda_compiler.products.grouped_matvec import MAX_ROWS, computes_rows, lower_grouped_vectors
from cuda_compiler.products.integer_rows import integer_rows_options
from cuda_compiler.products.matvec import as_vectors, lower_vectors
from cuda_compiler.products.packed import packed_options
from cuda_compiler.products.product import are_along_k, fits_coded_tiles, fits_tiles, offset_function
from cuda_compiler.products.row_followers import without_followers
from cuda_compiler.row_values import with_row_value
from cuda_compiler.rows import lower_map, lower_rows
from cuda_compiler.tiles.lowering import (
    bytes_of_a_result,
    close_tilings,
    partial_argument,
    tiles_microseconds,
)
from cuda_compiler.tiles.tiling import TILE_MACROS, Asked, Tiling
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall, LibraryCall, Step, choice_of
from npu_compiler.dtypes import FLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import traffic_of
from npu_compiler.lowering.problems.forms import Computed, Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.expr import Call, Load

__all__ = ["MATMUL", "MATMUL_PLAIN", "loads_codes", "loads_rows", "lower_matmul"]

_PARAMS = "int m, n, k, a_row, a_k, b_col, b_k, tiles_m, tiles_n"
MATMUL = KernelTemplate(
    "matmul",
    params=_PARAMS,
    macros=f"{CODE_MACROS} code_t? {TILE_MACROS} tile_t A_ALONG_K B_ALONG_K B_CONSTANT",
    inputs="a b codes? partial",
    shared_bytes=None,
    computed="codes",
)
MATMUL_PLAIN = KernelTemplate(
    "matmul_plain",
    params=_PARAMS,
    macros=f"{CODE_MACROS} a_t b_t A_ALONG_K B_ALONG_K",
    inputs="a b codes?",
    threads=256,
    computed="codes",
)

_PLAIN_SIDE = 64
_CHUNK = 8  # columns that a thread stores at a time


def loads_codes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is codes, and a product's right matrix, or its left one where a few vectors stand right."""
    problem = group.problem
    if not isinstance(operand, Dequantised) or not isinstance(problem, Product):
        return False
    if any(isinstance(other, Dequantised) for other in problem.operands):
        return False
    vectors = as_vectors(problem.with_operand(position, operand), group)
    return position == 1 or (vectors is not None and not vectors.by_row)


def loads_rows(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether an operand is rows of a product, those of a norm say, that each block of its kernel can compute."""
    problem = group.problem
    if not isinstance(problem, Product) or position != 0 or not isinstance(operand, Computed) or not operand.is_of_rows:
        return False
    found = problem.with_operand(position, operand)
    return computes_beside_codes(found, device) or computes_few_rows(found, device)


@lowering_of(Product)
def lower_matmul(found: Product, group: Group, lowering: Lowering) -> list[Step]:
    """One launch for operands of any strides, chosen by the device; or the library, and a launch for the epilogue.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    around = AnchoredGroup.of(group, lowering)
    few = few_rows_options(found, around)
    if not few:
        return choice_of(_any_rows(found, around))
    rows = found.a.operand
    if isinstance(rows, Computed):  # other launches read rows from memory
        stored, ahead = _with_rows_in_memory(found, rows, around)
        others = _any_rows(stored, around.of_problem(stored))
        return choice_of([*few, *(replace(option, calls=(*ahead, *option.calls)) for option in others)])
    others = _any_rows(found, around)
    if as_vectors(found, group) is None and fits_tiles(found):
        in_tiles = tiles_microseconds(_asked(found, around), lowering.device, are_along_k(found))
        if not is_quicker(found, in_tiles, lowering.device):
            return choice_of([*others[:-1], *few, others[-1]])
    return choice_of([*few, *others])


def _any_rows(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying beside those for a few rows alone; the last one is for any device."""
    kind = bytes_of(found)
    if kind is not None:
        return _byte_options(found, kind, around)
    if isinstance(found.b.operand, GroupedCodes):
        if found.m <= MAX_ROWS:
            quicker = [*integer_rows_options(found, around), *few_codes_options(found, around)]
            return [*quicker, _for_all_codes(found, around)]
        return packed_options(found, around, _options)
    vectors = as_vectors(found, around.group)
    if vectors is not None:
        return [CallOption("", (lower_vectors(vectors, found, around),))]
    if isinstance(found.b.operand, Dequantised) and fits_coded_tiles(found):
        return _coded_options(found, around)
    if not fits_tiles(found):
        return [CallOption("", (_lower_plain(found, around),))]
    return _options(found, around)


def _for_all_codes(found: Product, around: AnchoredGroup) -> CallOption:
    """The launch of a few rows for any device and all codes."""
    rows = found.a.operand
    if not isinstance(rows, Computed) or computes_rows(found):
        return CallOption("", (lower_grouped_vectors(found, around),))
    stored, ahead = _with_rows_in_memory(found, rows, around)
    return CallOption("", (*ahead, lower_grouped_vectors(stored, around.of_problem(stored))))


def _with_rows_in_memory(found: Product, rows: Computed, around: AnchoredGroup) -> tuple[Product, Sequence[KernelCall]]:
    """The product for launches that read its rows from memory, and the launches that compute them ahead."""
    return found.with_operand(0, rows.in_memory), lower_rows(rows.made, around.lowering)


def _options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying where both operands are numbers in memory; the last one is for any device."""
    asked = _asked(found, around)
    options = bulk_options(found, asked, with_row_value(around))
    alone, behind = without_followers(around)
    others = _other_options(found, asked, alone, bool(options))
    return [*options, *(replace(option, calls=(*option.calls, *behind)) for option in others)]


def _other_options(found: Product, asked: Asked, around: AnchoredGroup, has_quicker: bool) -> list[CallOption]:
    """Those that the copy engine has no part in; `has_quicker` where there are others, but not for every device."""
    tilings, valued = close_tilings(asked, around.device, are_along_k(found)), with_row_value(around)
    by_warpgroups = [] if has_quicker else [tiling for tiling in tilings if tiling.requires]
    options = []
    if _suits_library(found, around.device):
        options.append(CallOption(LIBRARY, tuple(_lower_to_library(found, around.group, around.lowering))))
    if has_quicker or options:
        tilings = (*by_warpgroups, next(tiling for tiling in tilings if not tiling.requires))
    return [*options, *(CallOption(tiling.requires, (_lower_tiled(found, valued, tiling),)) for tiling in tilings)]


def _coded_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying where codes become numbers on their way into shared memory, which threads do."""
    tilings = close_tilings(_asked(found, around), around.device, False)
    return [CallOption(tiling.requires, (_lower_tiled(found, around, tiling),)) for tiling in tilings]


def _byte_options(found: Product, kind: Bytes, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying where codes are multiplied by codes; the last one is for any device."""
    pairs, sums = in_pairs(found), kind.with_sums(around.group)
    whole = sums is not around.group
    asked = replace(_asked(found, around), k=pairs.k)
    options = []
    if suits_bulk(pairs):
        summed = AnchoredGroup.of(sums, around.lowering) if whole else around
        for tiling in bulk_byte_tilings(asked, around.device, whole):
            launch = lower_bulk(pairs, summed, tiling, FLOAT16, kind.kind.name)
            options.append(CallOption(WARPGROUPS, (launch,)))
    tilings = close_tilings(asked, around.device, False)
    for by_warps in tilings[:1] if options else tilings:
        options.append(CallOption(by_warps.requires, (_lower_tiled(pairs, around, by_warps, kind),)))
    return options


def _asked(found: Product, around: AnchoredGroup) -> Asked:
    """What is asked of tiles."""
    moved = bytes_of_a_result(found, around.group, around.lowering)
    return Asked(found.m, found.n, found.k, found.batches, moved)


@dataclass(frozen=True)
class _Library(FamilyConstants, family="library"):
    """The smallest product that the library is tried for."""

    rows: int
    columns: int


def _suits_library(found: Product, device: DeviceModel) -> bool:
    """Whether a product is large enough for the library to win more than an epilogue of its own costs."""
    plain, least = are_along_k(found) and found.batches == 1, _Library.of(device)
    return plain and found.m >= least.rows and found.n >= least.columns


def _lower_to_library(found: Product, group: Group, lowering: Lowering) -> list[KernelCall | LibraryCall]:
    """The product in its own data type, and what follows it as an elementwise kernel."""
    product = found.result
    attrs = {
        "dtype": product.dtype.name,
        "m": found.m,
        "n": found.n,
        "k": found.k,
        "a_row": found.a.along,
        "b_column": found.b.along,
        "out_row": found.n,
    }
    added = _added(found, group)
    result = product if added is None else group.output
    arguments, extra = ((), {}) if added is None else added
    call = LibraryCall(
        label=" + ".join(group.nodes),
        routine=LIBRARY_MATMUL,
        args=(found.a.argument, found.b.argument, *arguments, Argument(result.index, writes=True)),
        attrs={**attrs, **extra},
        flops=found.flops,
        nbytes=traffic_of(group, lowering.tensors) if group.output.index == result.index else _own_traffic(found),
    )
    if group.output.index == result.index:
        return [call]
    return [call, *lower_map(replace(group, problem=None), lowering)]


def _own_traffic(found: Product) -> int:
    return (found.m * found.k + found.k * found.n + found.m * found.n) * found.a.dtype.size


def _added(found: Product, group: Group) -> tuple[tuple[Argument], dict[str, int]] | None:
    """What the group adds to its product, as argument and attributes of the library's call, if that is all it does.

    That is a matrix that lies in rows, as the result does, or a bias: one row that is added to all.
    """
    expr, product = group.expr, found.result
    dtypes = {product.dtype, group.output.dtype, found.a.dtype}
    if not isinstance(expr, Call) or expr.fn != "add" or group.pairs != 1 or len(dtypes) != 1:
        return None
    loads = [term for term in expr.args if isinstance(term, Load) and term.index is None and {term.dtype} == dtypes]
    others = [load.ref for load in loads if load.ref.tensor != product.index]
    in_rows = group.index is None and group.view.strides[-2:] == (found.n, 1) and group.view.offset == 0
    if len(loads) != 2 or len(others) != 1 or not in_rows:
        return None
    ref = others[0].apply(("expand", group.shape))
    if ref is None or ref.view.strides[-1] != 1 or prod(group.shape[:-2]) != 1 or ref.view.offset % _CHUNK:
        return None
    row = ref.view.strides[-2]
    argument = Argument(ref.tensor, ref.view.offset * product.dtype.size)
    if row == 0:
        return (argument,), {"bias": 1}
    return ((argument,), {"addend_row": row}) if row >= found.n and row % _CHUNK == 0 else None


def _offsets(found: Product) -> str:
    functions = (offset_function(name, found.batch, part.batch) for name, part in (("a", found.a), ("b", found.b)))
    return "\n".join(functions)


def _lower_tiled(found: Product, around: AnchoredGroup, tiling: Tiling, kind: Bytes | None = None) -> KernelCall:
    lowering, device = around.lowering, around.device
    tiles_m, tiles_n = ceil_div(found.m, tiling.rows), ceil_div(found.n, tiling.columns)
    tiles = tiles_m * tiles_n * found.batches
    codes = code_function(found, lowering)
    is_constant = codes.are_constant if isinstance(found.b.operand, Dequantised) else found.b.is_constant
    macros = {
        **codes.macros,
        **tiling.macros(tiles, ceil_div(found.k, tiling.depth), tiling.panel(tiles_m, tiles_n, device)),
        "tile_t": kind.pair if kind else CUDA.storage[found.a.dtype.name],
        "A_ALONG_K": int(found.a.k == 1),
        "B_ALONG_K": int(found.b.k == 1),
        "B_CONSTANT": int(is_constant),
    }
    files = tiling.files if kind is None else (tiling.files[0], kind.file, *tiling.files[1:])
    if codes.prologues:
        macros["code_t"], files = CUDA.storage[found.b.dtype.name], (*files, "tile_codes.cuh")
    launch = Launch(
        MATMUL,
        grid=(tiling.grid(tiles, device), tiling.splits, 1),
        values={**found.values(), "tiles_m": tiles_m, "tiles_n": tiles_n},
        macros=macros,
        inputs={
            "a": found.a.argument,
            "b": found.b.argument,
            "partial": partial_argument(tiling, tiles, found.b.argument, lowering),
        },
        flops=found.flops * (2 if kind else 1),
        text="\n".join((codes.text, _offsets(found), tiling.functions(found.a.dtype.name))),
        files=files,
        prologues=codes.prologues,
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
    )
    fused = around.epilogue(around.pack_size(_CHUNK // around.group.pairs))
    return anchor_launch(launch, tiling.epilogue(fused), around.lowering)


def _lower_plain(found: Product, around: AnchoredGroup) -> KernelCall:
    tiles_m, tiles_n = ceil_div(found.m, _PLAIN_SIDE), ceil_div(found.n, _PLAIN_SIDE)
    codes = code_function(found, around.lowering)
    macros = {
        **codes.macros,
        "a_t": CUDA.storage[found.a.dtype.name],
        "b_t": CUDA.storage[found.b.dtype.name],
        "A_ALONG_K": int(found.a.k == 1),
        "B_ALONG_K": int(found.b.k == 1),
    }
    launch = Launch(
        MATMUL_PLAIN,
        grid=(tiles_m * tiles_n * found.batches, 1, 1),
        values={**found.values(), "tiles_m": tiles_m, "tiles_n": tiles_n},
        macros=macros,
        inputs={"a": found.a.argument, "b": found.b.argument},
        flops=found.flops,
        text="\n".join((codes.text, _offsets(found))),
        prologues=codes.prologues,
    )
    return around.launch(launch, 1)
