"""The Metal target: channels-last images with padded channels, everything else dense."""

from __future__ import annotations

from collections.abc import Sequence

from metal_compiler.attention.codes import loads_coded_rows
from metal_compiler.attention.lowering import loads_pages
from metal_compiler.devices import DEVICES
from metal_compiler.dialect import METAL
from metal_compiler.maps import lower_elementwise, lower_rows, lower_shared
from metal_compiler.products.codes import loads_codes
from metal_compiler.products.grouped_matvec import loads_grouped_codes
from metal_compiler.products.prologue import loads_vector
from npu_compiler.artifact.plan import Step
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.element import loads_element
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Paired
from npu_compiler.lowering.target import CodegenTarget, Lowering
from npu_compiler.tensor.expr import has_reduce
from npu_compiler.tensor.layout import Layout, channels_last, dense, filter_order

__all__ = ["CHANNEL_ALIGNMENT", "MetalTarget"]

CHANNEL_ALIGNMENT = 64


class MetalTarget(CodegenTarget):
    """Apple GPUs through Metal 3, and the software GPU."""

    name = "metal"
    compute_dtypes = ("float16", "bfloat16")
    storage_dtypes = frozenset(METAL.storage)
    package = "metal_compiler"
    devices = DEVICES

    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        if role == "image":
            return channels_last(shape, _aligned(shape[1]))
        if role == "conv_weight":
            return Layout(shape, (_aligned(shape[0]), *shape[1:]), (*filter_order(shape), 0))
        return dense(shape)

    def lower_shared(self, groups: Sequence[Group], lowering: Lowering) -> list[Step]:
        return [*lower_shared(groups, lowering)]

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        forms = loads_vector, loads_grouped_codes, loads_codes, loads_element, loads_pages, loads_coded_rows
        return isinstance(operand, Paired) or any(loads(group, position, operand) for loads in forms)

    def lower_map(self, group: Group, lowering: Lowering) -> Sequence[Step]:
        return lower_rows(group, lowering) if has_reduce(group.expr) else lower_elementwise(group, lowering)


def _aligned(channels: int) -> int:
    return ceil_div(channels, CHANNEL_ALIGNMENT) * CHANNEL_ALIGNMENT
