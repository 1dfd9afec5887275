"""The epilogue of a matmul, convolution, pooling or attention: what happens to a result between register and memory."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from cuda_compiler.maps import map_macros
from cuda_compiler.packing import epilogue
from cuda_compiler.short_codes import shortened
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch
from npu_compiler.records import changed

__all__ = ["anchor_epilogue", "anchor_launch", "single_launch"]

_POSITIONS, _NAMES = "int batch, int row, int col, ", "batch, row, col, "

anchor_launch = KERNELS.launch


def single_launch(launch: Launch, group: Group, lowering: Lowering) -> KernelCall:
    """A launch that computes a group around a problem, one result a time.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    return anchor_launch(launch, anchor_epilogue(group, epilogue_positions(group, lowering, "sum"), 1), lowering)


def anchor_epilogue(group: Group, found: Positions, size: int, gives: bool = False) -> Epilogue:
    """The functions that fetch operands, and that compute and store `size` neighbouring results of a thread.

    Args:
        group: What to compute.
        found: Its operands.
        size: Results of a pack.
        gives: As in `epilogue`.
    """
    anchor = group.anchor
    assert anchor is not None
    group = changed(group, expr=shortened(group.expr))
    values = f"const {CUDA.register(anchor.dtype)} (&value)[{size * group.pairs}], "
    text = epilogue(group, found, size, _POSITIONS, _NAMES, values, gives)
    macros = {**map_macros(group, found.operands), "STORE_SIZE": size, "PAIRS": group.pairs}
    return Epilogue(group, found, text, macros)
