"""A model in torch and as IR at once, compared on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import npu_compiler
from npu_compiler import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.support.ir_builder import IRBuilder, Value
from tests.support.running import host_array

__all__ = ["Model", "close"]


def close(result: NDArray[Any], expected: torch.Tensor, compute: torch.dtype = torch.float16) -> None:
    """Compares within twice the unit roundoff of the compute dtype: a mistake is larger by far."""
    eps = torch.finfo(compute).eps
    np.testing.assert_allclose(result.astype(np.float64), expected.double().numpy(), rtol=eps, atol=2 * eps)


class Model:
    """Inputs and weights with their values, and calls on them.

    Attributes:
        builder: Records the calls.
        tensors: Values by name; floating point is rounded to half precision.
    """

    def __init__(self, compute: torch.dtype = torch.float16) -> None:
        self.builder, self.compute = IRBuilder(), compute
        self.tensors: dict[str, torch.Tensor] = {}
        self._weights: list[str] = []
        self._generator = torch.Generator().manual_seed(0)

    def input(self, name: str, *shape: int, values: torch.Tensor | None = None) -> Value:
        tensor = self._keep(name, shape, values)
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return self.builder.input(name, tensor.shape, dtype)

    def weight(self, name: str, *shape: int, values: torch.Tensor | None = None) -> Value:
        self._weights.append(name)
        return self.builder.weight(name, self._keep(name, shape, values).shape)

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value:
        return self.builder.call(f"aten.{op}", *args, **kwargs)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def _keep(self, name: str, shape: tuple[int, ...], values: torch.Tensor | None) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator) if values is None else values
        self.tensors[name] = drawn.to(self.compute).double() if drawn.is_floating_point() else drawn
        return self.tensors[name]

    def compile(self, *outputs: Value) -> CompiledProgram:
        dtype = str(self.compute).removeprefix("torch.")
        return npu_compiler.compile(self.builder.build(*outputs), dtype=dtype)

    def run(self, device: Device, folder: Path, *outputs: Value) -> list[NDArray[Any]]:
        """Compiles, loads the weights and runs once."""
        program = self.compile(*outputs)
        weights = None
        if self._weights:
            save_file({name: self.tensors[name].float() for name in self._weights}, folder / "weights.safetensors")
            weights = load_weights(folder / "weights.safetensors", program, device)
        results = Executor(program, device).run(buffers(program, self.tensors, device), weights)
        return [results[spec.name].to_numpy(spec=spec) for spec in program.output_specs]


def buffers(program: CompiledProgram, tensors: Mapping[str, torch.Tensor], device: Device) -> dict[str, NPUBuffer]:
    """The inputs of a program on its device."""
    return {
        spec.name: NPUBuffer.from_numpy(host_array(tensors[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in program.input_specs
    }
