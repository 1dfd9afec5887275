"""NVIDIA's Model Optimizer: floats of four bits in groups (NVFP4), and 8-bit floats.

Layout: NVFP4 has ``weight`` uint8 [rows, columns / 2], the first of two codes in the low bits, ``weight_scale``
float8_e4m3fn [rows, columns / 16], and ``weight_scale_2``, which multiplies all; FP8 has ``weight`` float8_e4m3fn and
``weight_scale``, one number for all or for each row; MXFP8 powers of two in uint8 [rows, columns / 32] there. Layers
may differ, so that data types say what a weight is.
"""

from __future__ import annotations

import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Config, Importer, group_size, option
from npu_compiler.frontend.checkpoints.small_floats import E2M1, floats_of_a_byte, powers_of_two, times
from npu_compiler.frontend.checkpoints.tensors import Tensors

__all__ = ["ModelOpt"]

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MIXED_PRECISION")
_SCALES = ("float32", "bfloat16", "float16")
_OF_ACTIVATIONS = ("input_scale", "k_scale", "v_scale")  # which stay as the model computes them
_NV_GROUP, _MX_GROUP = 16, 32


class ModelOpt(Importer):
    """``quant_method: modelopt``."""

    default_dtype = "bfloat16"

    def __init__(self, config: Config) -> None:
        option(config, "quant_algo", _ALGORITHMS)

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name, scale = f"{module}.weight", f"{module}.weight_scale"
        tensors.skip(*(f"{module}.{end}" for end in _OF_ACTIVATIONS))
        if scale not in tensors:
            return None
        if f"{module}.pre_quant_scale" in tensors:
            raise ExtractionError(
                f"'{module}.pre_quant_scale': given a scale for activations, expected weights alone; export it with "
                "such scales folded into the layers ahead"
            )
        rows, columns = shape
        codes = tensors.take(name, None, ("uint8", "float8_e4m3fn"))
        if codes.dtype == np.uint8:
            return self._of_four_bits(module, shape, tensors)
        codes, scales = tensors.take(name, shape), tensors.take(scale, None, ("uint8", *_SCALES))
        if scales.dtype == np.uint8:
            group = group_size(scale, _MX_GROUP, columns)
            powers = powers_of_two(tensors.take(scale, (rows, columns // group)))
            return CodedMatrix(shape, 8, codes, columns, powers, group, scales_name=scale)
        if scales.size not in (1, rows):
            raise ExtractionError(f"'{scale}': given the shape {list(scales.shape)}, expected 1 or {rows} numbers")
        height = rows if scales.size == 1 else 1
        each = np.ascontiguousarray(scales.reshape(-1, 1))
        return CodedMatrix(shape, 8, codes, columns, each, columns, rows=height, scales_name=scale)

    @staticmethod
    def _of_four_bits(module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix:
        rows, columns = shape
        scale, whole = f"{module}.weight_scale", f"{module}.weight_scale_2"
        codes = tensors.take(f"{module}.weight", (rows, columns // 2))
        group = group_size(scale, _NV_GROUP, columns)
        own = floats_of_a_byte(tensors.take(scale, (rows, columns // group), ("float8_e4m3fn", "uint8")))
        scales = times(whole, own, tensors.take(whole, None, ("float32",)))
        return CodedMatrix(shape, 4, codes, columns, scales, group, codebook=E2M1, scales_name=scale)
