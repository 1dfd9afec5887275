"""transformers' own MXFP4: the matrices of experts in floats of four bits, as gpt-oss is published.

Layout: of a parameter ``P`` [experts, inputs, outputs] the tensors ``P_blocks`` uint8 [experts, outputs, groups, 16],
the first of two codes in the low bits, and ``P_scales`` uint8 [experts, outputs, groups], powers of two of 32 inputs
each. All other weights are plain numbers.
"""

from __future__ import annotations

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer
from npu_compiler.frontend.checkpoints.small_floats import E2M1, powers_of_two
from npu_compiler.frontend.checkpoints.tensors import Tensors

__all__ = ["Mxfp4"]

_GROUP = 32


class Mxfp4(Importer):
    """``quant_method: mxfp4``."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        pass

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        return None

    def experts(self, name: str, shape: tuple[int, int, int], tensors: Tensors) -> CodedMatrix | None:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks not in tensors and scales not in tensors:
            return None
        count, inputs, outputs = shape
        if inputs % _GROUP:
            raise ExtractionError(f"'{blocks}': given {inputs} inputs, expected a multiple of {_GROUP}")
        groups = inputs // _GROUP
        codes = tensors.take(blocks, (count, outputs, groups, _GROUP // 2), ("uint8",))
        powers = tensors.take(scales, (count, outputs, groups), ("uint8", "float8_e8m0fnu"))
        whole = (count, outputs * inputs)
        return CodedMatrix(
            whole,
            4,
            codes.reshape(count, -1),
            whole[1],
            powers_of_two(powers.reshape(count, -1)),
            _GROUP,
            codebook=E2M1,
            scales_name=scales,
        )
