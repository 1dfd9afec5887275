"""Compiles an IR and runs it once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_runtime import Device, Executor, NPUBuffer

__all__ = ["host_array", "run_ir"]


def host_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A tensor as the numpy array of a program's input; numpy knows bfloat16 by `ml_dtypes` only."""
    if dtype == ml_dtypes.bfloat16:
        return tensor.float().numpy().astype(dtype)
    return tensor.numpy().astype(dtype)


def run_ir(
    ir: Mapping[str, Any], inputs: Mapping[str, torch.Tensor], device: Device, dtype: str | None = None
) -> list[NDArray[Any]]:
    """The outputs of an IR without weights, in order."""
    program = npu_compiler.compile(ir, target=device.target, dtype=dtype)
    buffers = {
        spec.name: NPUBuffer.from_numpy(host_array(inputs[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in program.input_specs
    }
    outputs = Executor(program, device).run(inputs=buffers)
    return [outputs[spec.name].to_numpy(spec=spec) for spec in program.output_specs]
