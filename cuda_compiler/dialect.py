"""What CUDA C++ says differently from the common subset; the types are those of `kernels/common.cuh`."""

from __future__ import annotations

from npu_compiler.dtypes import FLOAT8_E4M3FN
from npu_compiler.lowering.dialect import Dialect

__all__ = ["CUDA", "FLOAT8_CODE", "NUMBER_OF_BYTE", "PACK_OF_BYTES", "PACK_OF_FLOAT8", "SUM_OF_LANES"]

FLOAT8_CODE = "float8_e4m3_code"
"""The function that makes codes of 8-bit floats (float8_codes.cuh)."""
PACK_OF_FLOAT8 = "pack_of_float8_e4m3"
"""The function that makes packs of them, in half of the instructions."""
NUMBER_OF_BYTE, PACK_OF_BYTES = "number_of_byte", "pack_of_bytes"
"""The functions that read and make packs of bytes (byte_packs.cuh)."""
SUM_OF_LANES = "sum_of_lanes"
"""The function that adds what four neighbouring lanes have (lane_sums.cuh)."""

CUDA = Dialect(
    storage={
        "bool": "bool",
        "uint8": "uint8",
        "int8": "int8",
        "int16": "int16",
        "int32": "int",
        "int64": "int64",
        "float16": "half",
        "bfloat16": "bfloat",
        "float32": "float",
    },
    pointer="const {type}*",
    faults="Fault*",
    functions={
        "quotient": "quotient({0}, {1})",
        "short_exp": "short_exp({0})",
        "max": "greater({0}, {1})",
        "min": "lesser({0}, {1})",
        "nearest": "nearest({0})",
        "saturate": "__saturatef({0})",
        "code": "rounded_code({0}, {1})",
        "bits": "__float_as_int({0})",
        "of_bits": "__int_as_float({0})",
    },
    infinity="__int_as_float(0x7f800000)",
    nan="__int_as_float(0x7fffffff)",
    inline="__device__ __forceinline__",
    encoders={FLOAT8_E4M3FN: f"{FLOAT8_CODE}({{0}})"},
)
