"""Lowers the maxima of a convolution of few channels: it is computed where they are, and never goes to memory."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.images.directions import DirectedGroup
from cuda_compiler.images.window_tiles import (
    GROUP_THREADS,
    STAGED_BYTES,
    Tiles,
    stores_by_channel,
    window_launch,
    window_template,
)
from cuda_compiler.images.windows import PIXEL_MACROS, is_of_few_channels, pixel_macros, window_under
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import Produced
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.pooling import Pooling
from npu_compiler.lowering.target import Lowering
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Const, Expr, Load, Ref, reindex, substitute
from npu_compiler.tensor.view import Step

__all__ = ["CONV2D_WINDOW_POOL", "loads_produced", "lower_pooled_windows"]

_COLUMNS = 16  # results of a line of a tile: two products of 8
_MAXIMA_Y, _SLOTS_X = 8, 8  # of a tile, and of its lines in shared memory
_GREATER = {FLOAT16: "max.NaN.f16x2", BFLOAT16: "max.NaN.bf16x2", INT8: "max.s16x2", UINT8: "max.u16x2"}
_LEAST = {FLOAT16: 0xFC00, BFLOAT16: 0xFF80, INT8: 0xFF80, UINT8: 0}  # in 16 bits

CONV2D_WINDOW_POOL = window_template(
    "conv2d_window_pool",
    (
        f"{PIXEL_MACROS} POOL_TAPS_Y POOL_TAPS_X POOL_PAD_Y POOL_PAD_X POOLED_HEIGHT POOLED_WIDTH POOLED_Y POOLED_X "
        "GREATER_PAIR LEAST"
    ),
    threads=GROUP_THREADS,
    shared_bytes=lambda macros: macros["WINDOW_BYTES"] + macros["POOLED_Y"] * _SLOTS_X * STAGED_BYTES,
    files="window_pixels.cuh",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="pooled_windows"):
    """How many blocks share a multiprocessor, and how many tiles of a block make up for its beginning and its end."""

    blocks: int
    least_rounds: int


def loads_produced(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether a pooling may compare the results of a convolution where they are computed."""
    pool = group.problem
    if not isinstance(operand, Produced) or not isinstance(pool, Pooling):
        return False
    if operand.stored or operand.made.added is not None:
        return False
    windows, made = pool.windows, operand.made
    if not len(group.shape) == len(made.shape) == 4:
        return False
    alone = _is_maximum(group.expr) and group.output.dtype == made.output.dtype
    short = all(taps in (2, 3) for taps in windows.kernel) and pool.maximum and not pool.adaptive
    by_twos = windows.stride == (2, 2) and windows.dilation == (1, 1)
    covered = all(count <= of for count, of in zip(pool.shape[2:], made.shape[2:], strict=True))
    conv = made.problem
    fits = isinstance(conv, Convolution) and is_of_few_channels(conv, device) and made.output.dtype in _GREATER
    return alone and short and by_twos and covered and fits


def _is_maximum(expr: Expr) -> bool:
    """Whether a pooling stores its maxima, be they codes, as they are."""
    of_codes = (
        isinstance(expr, Call) and expr.fn == "code" and isinstance(expr.args[1], Const) and not expr.args[1].value
    )
    return isinstance(expr.args[0] if isinstance(expr, Call) and of_codes else expr, Load)


def lower_pooled_windows(pool: Pooling, group: Group, lowering: Lowering) -> KernelCall | None:
    """One launch: a block takes tiles of maxima in turn; None where the convolution is none for it, or too small.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    assert isinstance(pool.image, Produced)
    conv, joined = pool.image.made.problem, _joined(group, pool.image.made)
    assert isinstance(conv, Convolution)
    if joined is None:
        return None
    work, tiles = DirectedGroup.of(joined, lowering), _tiles(pool)
    window = window_under(conv, tiles)
    if not (window.fits(conv) and stores_by_channel(conv, work) and tiles.is_filled(pool.shape)):
        return None
    windows, costs = pool.windows, _Costs.of(lowering.device)
    at_a_time = costs.blocks * lowering.device.cores
    if tiles.count < costs.least_rounds * at_a_time:
        return None
    macros = {
        **pixel_macros(conv, window, costs.blocks),
        "POOL_TAPS_Y": windows.kernel[0],
        "POOL_TAPS_X": windows.kernel[1],
        "POOL_PAD_Y": windows.padding[0],
        "POOL_PAD_X": windows.padding[1],
        "POOLED_HEIGHT": pool.shape[2],
        "POOLED_WIDTH": pool.shape[3],
        "POOLED_Y": _MAXIMA_Y,
        "POOLED_X": tiles.stored_x,
        "GREATER_PAIR": f'"{_GREATER[joined.output.dtype]}"',
        "LEAST": _LEAST[joined.output.dtype],
    }
    return window_launch(CONV2D_WINDOW_POOL, conv, work, macros, tiles, at_a_time)


def _tiles(pool: Pooling) -> Tiles:
    """A tile has the results under whole windows: the last of a line may be under none."""
    lines = pool.windows.span(0, _MAXIMA_Y)
    maxima_x = (_COLUMNS - pool.windows.kernel[1]) // 2 + 1
    batch, _, height, width = pool.shape
    count = batch * ceil_div(height, _MAXIMA_Y) * ceil_div(width, maxima_x)
    return Tiles(_COLUMNS, lines, maxima_x, _MAXIMA_Y, count, 8 * lines)


def _joined(group: Group, made: Group) -> Group | None:
    """A group of the pooling's shape whose expression is what the convolution's results become ahead of it.

    It reads by channel alone, so that any of the results' positions serve; None where that cannot be said.
    """
    assert group.anchor is not None
    assert made.anchor is not None
    own, result = made.anchor.index, group.anchor
    steps: tuple[Step, ...] = tuple(("slice", (dim, 0, group.shape[dim], 1)) for dim in (2, 3))
    expr = reindex(made.expr, made.shape, steps)

    def renamed(node: Expr) -> Expr | None:
        of_own = isinstance(node, Load) and node.ref.tensor == own
        return Load(Ref(result.index, result.view), node.dtype) if of_own else None

    return None if expr is None else changed(group, expr=substitute(expr, renamed))
