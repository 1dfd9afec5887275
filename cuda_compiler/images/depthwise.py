"""Lowers convolutions whose filters have one channel: depthwise ones, and those of images with one channel."""

from __future__ import annotations

from math import prod

from cuda_compiler.devices import busy_threads
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.directions import BACKWARDS, DirectedGroup
from cuda_compiler.images.image_packing import SIZE_MACROS, TAP_MACROS, along_axes, image_macros
from cuda_compiler.packing import PACK_SIZES
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.operand import are_chunks
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["CONV2D_DEPTHWISE", "depthwise_pack", "lower_depthwise"]

_THREADS = 128
_ALONG = 4  # neighbouring results of a line, which share what they read
_TALL = 5  # lines of taps from which on results of two lines share them, too
_MAX_LINE = 16  # packs of a line that a thread holds where results share them; twice as many single pixels
_MAX_TAPS_X = 40  # that fit into registers
_MAX_UNROLLED = 16  # taps whose loops are unrolled
CONV2D_DEPTHWISE = KernelTemplate(
    "conv2d_depthwise",
    params=f"int {BACKWARDS}, groups",
    macros=(
        f"a_t b_t PACKS ALONG_Y ALONG_X UNROLL_Y SHARED_CHANNEL {TAP_MACROS} {SIZE_MACROS} IMAGE_STRIDE Y_STRIDE "
        "X_STRIDE W_Y W_X"
    ),
    inputs="image weight",
    threads=_THREADS,
    files="pixel_groups.cuh",
)


def depthwise_pack(conv: Convolution, work: DirectedGroup) -> int:
    """Channels of a thread, which read and store them together; 1 where this kernel is none for a convolution."""
    alone = conv.channels == 1 and (conv.groups == 1 or conv.outputs == 1)
    alone &= conv.windows.span(1, 1) <= _MAX_TAPS_X
    size = work.pack_size(width=conv.shape[1])
    if not alone or size not in PACK_SIZES or not are_chunks(size, conv.weight.strides[0], conv.weight.across(0)):
        return 1
    shared = conv.groups == 1 or conv.image.shape[1] == 1
    return size if shared or are_chunks(size, conv.image.strides[1], conv.image.across(1)) else 1


def lower_depthwise(conv: Convolution, size: int, work: DirectedGroup) -> KernelCall:
    """One thread a pack of channels of several neighbouring results."""
    batch, channels, out_height, out_width = conv.shape
    along_y, along_x = _along(conv, size, work.device)
    groups, packs = batch * ceil_div(out_height, along_y) * ceil_div(out_width, along_x), channels // size
    windows, taps = conv.windows, prod(conv.windows.kernel)
    macros = {
        **along_axes(TAPS=windows.kernel, STEP=windows.stride, PAD=windows.padding, DILATION=windows.dilation),
        "a_t": CUDA.storage[conv.image.dtype.name],
        "b_t": CUDA.storage[conv.weight.dtype.name],
        "PACKS": packs,
        "ALONG_Y": along_y,
        "ALONG_X": along_x,
        "UNROLL_Y": windows.span(0, along_y) if taps <= _MAX_UNROLLED else 1,
        "SHARED_CHANNEL": int(conv.image.shape[1] == 1),
        **CONV2D_DEPTHWISE.macros_among(image_macros(conv.image, conv.shape)),
        "W_Y": conv.weight.strides[2],
        "W_X": conv.weight.strides[3],
    }
    launch = Launch(
        CONV2D_DEPTHWISE,
        grid=(ceil_div(groups * packs, _THREADS), 1, 1),
        values={BACKWARDS: work.backwards, "groups": groups},
        macros=macros,
        inputs=conv.arguments,
        flops=conv.flops,
    )
    return work.directed(launch, size)


def _along(conv: Convolution, size: int, device: DeviceModel) -> tuple[int, int]:
    """Results of a thread along y and x: several where windows overlap and there is work for all threads."""
    windows = conv.windows
    busy = busy_threads(device, "pooling")
    threads = prod(conv.shape) // size
    most = _MAX_LINE * (2 if conv.image.shape[1] == 1 else 1)
    along_x = _ALONG if windows.span(1, _ALONG) <= most and windows.dilation[1] == 1 else 1
    while along_x > 1 and (conv.shape[3] < along_x or threads < along_x * busy):
        along_x //= 2
    tall = windows.kernel[0] >= _TALL and windows.stride[0] == windows.dilation[0] == 1
    return (2 if tall and threads >= 2 * along_x * busy else 1), along_x
