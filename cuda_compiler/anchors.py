"""The epilogue of a matmul, convolution, pooling or attention: what happens to a result between register and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from cuda_compiler.dialect import CUDA
from cuda_compiler.epilogues import columns_are_settled, epilogue
from cuda_compiler.maps import map_macros
from cuda_compiler.packing import PACK_SIZES, pack_size
from cuda_compiler.short_codes import in_few_instructions
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch
from npu_compiler.records import changed

__all__ = ["AnchoredGroup", "anchor_epilogue", "anchor_launch", "single_launch"]

_POSITIONS, _NAMES = "int batch, int row, int col, ", "batch, row, col, "

anchor_launch = KERNELS.launch


def single_launch(launch: Launch, group: Group, lowering: Lowering) -> KernelCall:
    """A launch that computes a group around a problem, one result a time.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    return AnchoredGroup.of(group, lowering).launch(launch, 1)


@dataclass(frozen=True)
class AnchoredGroup:
    """A group around a problem while it is lowered: all ways to compute the problem end in the same epilogue.

    Attributes:
        group: What is computed.
        found: The operands of its epilogue.
        lowering: Where launches are collected.
    """

    group: Group
    found: Positions
    lowering: Lowering
    _epilogues: dict[int, Epilogue] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, group: Group, lowering: Lowering) -> Self:
        """A group with the operands of its epilogue.

        Raises:
            OpRefusal: A tensor that the epilogue reads is too large.
        """
        return cls(group, epilogue_positions(group, lowering, "sum"), lowering)

    def of_problem(self, problem: Problem) -> Self:
        """The same around a problem in another form."""
        return replace(self, group=changed(self.group, problem=problem))

    @property
    def device(self) -> DeviceModel:
        """What choices are made for."""
        return self.lowering.device

    def pack_size(self, most: int = PACK_SIZES[0], width: int | None = None) -> int:
        """How many neighbours the epilogue may read and store together.

        Args:
            most: Neighbours that a thread stores at a time at the most.
            width: Extent of the dimension along which they lie, where it is not all of the last one.
        """
        extent = self.group.shape[-1] if width is None else width
        return min(most, pack_size(self.group, self.found.operands, extent, most=max(most, PACK_SIZES[0])))

    @property
    def columns_are_settled(self) -> bool:
        """Whether what the epilogue reads of each column alone is there before the launch ahead has finished."""
        return columns_are_settled(self.group, self.found, self.lowering)

    def epilogue(self, size: int) -> Epilogue:
        """The epilogue of kernels whose threads store so many neighbours together; printed once."""
        if size not in self._epilogues:
            self._epilogues[size] = anchor_epilogue(self.group, self.found, size)
        return self._epilogues[size]

    def launch(self, launch: Launch, size: int) -> KernelCall:
        """The call of a kernel whose threads store so many neighbours together."""
        return anchor_launch(launch, self.epilogue(size), self.lowering)


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
    group = in_few_instructions(group)
    values = f"const {CUDA.register(anchor.dtype)} (&value)[{size * group.pairs}], "
    text = epilogue(group, found, size, _POSITIONS, _NAMES, values, gives)
    macros = {**map_macros(group, found.operands), "STORE_SIZE": size, "PAIRS": group.pairs}
    return Epilogue(group, found, text, macros)
