"""The functions of a language model, ready to run: compiled to one program, or partitioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import InputError, ProgramFormatError
from npu_compiler.partitioner import PartitionPlan, partition
from npu_compiler.tensor.layout import BufferSpec
from npu_model.dag_executor import DAGExecutor
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import load_weights
from npu_runtime.workspace import Workspace

__all__ = ["PartitionedFunctions", "ProgramFunctions", "StepFunction", "StepFunctions", "Tensor"]
__all__ += ["device_buffer", "open_program", "partition_functions", "visible", "writable", "write_number"]

Tensor = NPUBuffer | NDArray[Any]


class StepFunction(NamedTuple):
    """A function that is ready to run.

    Attributes:
        input_specs: How those of its inputs that the device reads lie there.
        run: Runs it once.
        plan, bind: What the device replays, and `Executor.bind` of it for inputs and outputs; None where the device
            does not do all of it.
    """

    input_specs: Mapping[str, BufferSpec]
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    plan: ExecutionPlan | None = None
    bind: Callable[[Mapping[str, NPUBuffer], Mapping[str, NPUBuffer]], BoundPlan] | None = None


class StepFunctions(Protocol):
    """Functions by name, with one set of weights."""

    def prepare(self, name: str) -> StepFunction:
        """Makes a function ready, its kernels compiled."""


class ProgramFunctions:
    """One program, which runs on the device as a whole.

    Attributes:
        program: The program.
        weights: On the device, for all functions.
    """

    def __init__(self, program: CompiledProgram, weights: Path, device: Device) -> None:
        self.program, self._device = program, device
        self._workspaces: dict[Device, Workspace] = {}  # tokens come one after another, and so do the functions
        self.weights = load_weights(weights, program, device)

    def executor(self, name: str, device: Device | None = None) -> Executor:
        """A function's executor, in memory that all functions on its device share.

        Args:
            name: Of the function.
            device: A sibling of the device, for what overlaps with others; the device when omitted.
        """
        device = device or self._device
        workspace = self._workspaces.setdefault(device, Workspace(device.backend))
        return Executor(self.program, device, name, workspace)

    def prepare(self, name: str) -> StepFunction:
        """As `StepFunctions.prepare`."""
        executor = self.executor(name)
        run: Any = partial(executor.run, weights=self.weights)
        specs = {spec.name: spec for spec in executor.plan.inputs}
        return StepFunction(specs, run, executor.plan, partial(executor.bind, weights=self.weights))


class PartitionedFunctions:
    """Partition plans, whose operations run on the device or on the CPU.

    Attributes:
        executor: Of all functions.
    """

    def __init__(self, plans: Mapping[str, PartitionPlan], weights: Path, device: Device) -> None:
        self.executor = DAGExecutor(plans, device)
        self.executor.load_weights(weights)

    def prepare(self, name: str) -> StepFunction:
        """As `StepFunctions.prepare`."""
        if name not in self.executor.functions:
            raise InputError(
                f"given plans for {', '.join(self.executor.functions)}, expected one for '{name}' too; partition each "
                "IR of the folder"
            )
        return StepFunction(self.executor.functions[name].input_specs, partial(self.executor.execute, function=name))


def device_buffer(device: Device, spec: BufferSpec) -> NPUBuffer:
    """Memory for a tensor; what lies there is not promised."""
    return NPUBuffer(device, device.backend.allocate(spec.nbytes), spec)


def visible(device: Device, spec: BufferSpec) -> tuple[NDArray[Any], NPUBuffer]:
    """Memory that host and device see: as the host does, and as the device does."""
    buffer = NPUBuffer(device, device.backend.allocate_visible(spec.nbytes), spec)
    return writable(buffer), buffer


def writable(buffer: NPUBuffer) -> NDArray[Any]:
    """What a buffer in visible memory holds, to be read and written."""
    with buffer.data.writing() as content:
        return buffer.spec.layout.view(content.view(buffer.spec.dtype.numpy))


def write_number(buffer: NPUBuffer, number: int) -> None:
    """Makes every element of a tensor on the device this number."""
    buffer.device.backend.write(np.full(buffer.shape, number, np.int64), buffer.spec, buffer.data)


def open_program(folder: Path, irs: Mapping[str, str], target: str, name: str = "model") -> CompiledProgram:
    """The compiled program of some functions of a folder, which is kept beside the IRs as ``NAME.TARGET.npubin``.

    It is compiled anew where an IR is younger, or where it was written by another release.

    Args:
        folder: What `npu extract-llm` made.
        irs: The functions' files, by their names.
        target: What to compile for.
        name: What the program is called.

    Raises:
        IRError: An IR is missing or malformed.
        UnsupportedOpError: The model does not run on the target as a whole.
    """
    path = folder / f"{name}.{target}.npubin"
    sources = {function: folder / ir for function, ir in irs.items()}
    youngest = max((source.stat().st_mtime_ns for source in sources.values() if source.exists()), default=0)
    with suppress(ProgramFormatError):
        if not path.exists() or youngest <= path.stat().st_mtime_ns:
            return CompiledProgram.load(path)
    program = compile(sources, target)
    with suppress(ProgramFormatError):  # a folder that cannot be written costs the compilation at each start
        program.save(path)
    return program


def partition_functions(folder: Path, target: str) -> dict[str, PartitionPlan]:
    """The functions of a folder, each divided between the device and the CPU.

    Raises:
        IRError: The folder is no language model, or an IR is missing or malformed.
    """
    steps = GenerationSpec.load(folder).functions
    return {name: partition(folder / step.ir, target=target) for name, step in steps.items()}
