"""What Metal's C++ says differently from the common subset."""

from __future__ import annotations

from npu_compiler.lowering.dialect import Dialect

__all__ = ["METAL"]

METAL = Dialect(
    storage={
        "bool": "bool",
        "uint8": "uchar",
        "int8": "char",
        "int16": "short",
        "int32": "int",
        "int64": "long",
        "float16": "half",
        "bfloat16": "bfloat",
        "float32": "float",
    },
    pointer="device const {type}*",
    faults="device Fault*",
    inline="METAL_FUNC",
    params="constant Params& p",
    functions={
        "erf": "npu_erf({0})",
        "exp": "precise::exp({0})",
        "tanh": "precise::tanh({0})",
        "pow": "precise::pow({0}, {1})",
        "bits": "as_type<int>({0})",
        "of_bits": "as_type<float>({0})",
    },
)
