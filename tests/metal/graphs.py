"""Small graphs built op by op, computed by PyTorch in float64 and by the Metal kernels, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from npu_compiler import CompiledProgram, compile
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.workspace import Workspace
from tests.support.ir_builder import IRBuilder, Value, overload_of

__all__ = ["Graph", "Node"]

_EPSILON = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}


@dataclass(frozen=True)
class Node:
    """A tensor of the graph, and what PyTorch computes for it in float64."""

    value: Value
    reference: torch.Tensor


class Graph:
    """A graph under construction, for one compute dtype. Values are drawn from a fixed seed."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype = dtype
        self._builder = IRBuilder("metal_test")
        self._random = torch.Generator().manual_seed(0)
        self._inputs: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def input(self, *shape: int, dtype: torch.dtype | None = None, data: torch.Tensor | None = None) -> Node:
        """An input; random unless `data` is given."""
        name, kind = f"input_{len(self._inputs)}", dtype or self.dtype
        self._inputs[name] = (self._draw(shape) if data is None else data).to(kind)
        return Node(self._builder.input(name, shape, kind), self._inputs[name].double())

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> Node:
        name, kind = f"weight_{len(self._weights)}", dtype or self.dtype
        self._weights[name] = self._draw(shape).to(kind)
        return Node(self._builder.weight(name, shape, kind), self._weights[name].double())

    def call(self, op: str, *args: Any, **kwargs: Any) -> Node:
        """One node; the operator's name without ``aten.``, with its overload."""
        name = f"aten.{op}" if op.count(".") else f"aten.{op}.default"
        value = self._builder.call(name, *(_plain(arg) for arg in args), **kwargs)
        with torch.no_grad():
            reference = overload_of(name)(*(_reference(arg) for arg in args), **kwargs)
        return Node(value, reference)

    def compile(self, *outputs: Node) -> CompiledProgram:
        name = {torch.float16: "float16", torch.bfloat16: "bfloat16"}.get(self.dtype)
        return compile(self._builder.build(*(node.value for node in outputs)), dtype=name)

    def run(self, program: CompiledProgram, device: Device) -> list[torch.Tensor]:
        """The outputs as the kernels compute them. Memory that nothing was written to holds NaN."""
        workspace = Workspace(device.backend)
        executor = Executor(program, device, workspace=workspace)
        for memory in workspace.arenas(executor.plan).values():
            with memory.writing() as content:
                content[:] = 255
        inputs = {
            spec.name: NPUBuffer.from_numpy(_array(self._inputs[spec.name]), device, spec)
            for spec in program.input_specs
        }
        weights = load_weights({name: _array(tensor) for name, tensor in self._weights.items()}, program, device)
        results = executor.run(inputs, weights)
        arrays = [results[spec.name].to_numpy(spec) for spec in program.output_specs]
        return [torch.from_numpy(array.astype(np.float64)) for array in arrays]

    def check(self, *outputs: Node, roundings: int = 1, device: Device | None = None) -> CompiledProgram:
        """Compares every output with its reference.

        Args:
            outputs: What the graph gives.
            roundings: How many tensors in half precision lie on the way.
            device: Where to run; the software GPU as users get it when omitted.
        """
        program = self.compile(*outputs)
        for node, result in zip(outputs, self.run(program, device or Device("software-metal")), strict=True):
            expected = node.reference.double()
            finite = expected[expected.isfinite()].abs()
            scale = float(finite.max()) if finite.numel() else 1.0
            relative = roundings * _EPSILON[self.dtype]
            slack = 1e-5 if roundings == 1 else relative
            torch.testing.assert_close(result, expected, rtol=relative, atol=slack * scale, equal_nan=True)
        return program

    def _draw(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=self._random, dtype=torch.float64) * 2 - 1


def _plain(argument: Any) -> Any:
    if isinstance(argument, Node):
        return argument.value
    return [_plain(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _reference(argument: Any) -> Any:
    if isinstance(argument, Node):
        return argument.reference
    return [_reference(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
