"""The CUDA target: dense tensors, channels-last images, kernels as CUDA C++ that any GPU from 7.0 up compiles.

Only weights of convolutions are padded: zeros fill up their taps to chunks that are copied at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.attention.codes import loads_coded_rows
from cuda_compiler.attention.decode import loads_fresh
from cuda_compiler.attention.paged import loads_pages
from cuda_compiler.devices import DEVICES
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.back_to_back import loads_results
from cuda_compiler.images.convolution import loads_convolution, multiplies_codes
from cuda_compiler.images.image_packing import filter_layout
from cuda_compiler.images.pooled_windows import loads_produced
from cuda_compiler.products.bulk import loads_unscaled
from cuda_compiler.products.byte_products import loads_bytes
from cuda_compiler.products.grouped_matvec import loads_grouped_codes
from cuda_compiler.products.matmul import loads_codes, loads_rows
from cuda_compiler.products.matvec import loads_vector
from cuda_compiler.products.packed import loads_packed
from cuda_compiler.rows import lower_map
from cuda_compiler.scatter import loads_values
from cuda_compiler.shared import lower_shared
from npu_compiler.artifact.plan import Step
from npu_compiler.ir import TensorSpec
from npu_compiler.lowering.element import loads_element
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Paired
from npu_compiler.lowering.target import CodegenTarget, Lowering
from npu_compiler.tensor.layout import Layout, channels_last, dense

__all__ = ["CUDATarget"]


class CUDATarget(CodegenTarget):
    """NVIDIA GPUs of compute capability 7.0 and up.

    Every kernel begins with `wait_for_previous_grid`, so that the runtime may launch it before the kernel ahead of it
    has finished.
    """

    name = "cuda"
    compute_dtypes = ("float16", "bfloat16")
    storage_dtypes = frozenset(CUDA.storage)
    package = "cuda_compiler"
    devices = DEVICES

    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        if role == "conv_weight":
            return filter_layout(shape)
        return channels_last(shape, shape[1]) if role == "image" else dense(shape)

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        products = loads_vector, loads_grouped_codes, loads_packed, loads_codes, loads_bytes
        forms = *products, loads_fresh, loads_pages, loads_convolution, loads_element, loads_values
        if isinstance(operand, Paired) or any(loads(group, position, operand) for loads in forms):
            return True
        return any(
            loads(group, position, operand, self.device)
            for loads in (loads_rows, loads_coded_rows, loads_produced, loads_results, loads_unscaled)
        )

    def multiplies_codes(self, image: TensorSpec, weight: TensorSpec, groups: int) -> bool:
        return multiplies_codes(weight, groups)

    def lower_shared(self, groups: Sequence[Group], lowering: Lowering) -> list[Step]:
        return [*lower_shared(groups, lowering)]

    def lower_map(self, group: Group, lowering: Lowering) -> Sequence[Step]:
        return lower_map(group, lowering)
