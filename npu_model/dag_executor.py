"""Runs a partitioned model, and compiles what of it is for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import InputError
from npu_compiler.partitioner import PartitionPlan
from npu_runtime.backend import Backend
from npu_runtime.dag_executor import CompiledPart, PartitionExecutor
from npu_runtime.device import Device

__all__ = ["DAGExecutor"]

CompileFunction = Callable[[Mapping[str, Any]], CompiledProgram]


class DAGExecutor(PartitionExecutor):
    """A partitioned model, or several that share their weights, such as a prefill and a decode step.

    Tensors stay on the device between its partitions, and cross once where the CPU needs them. What crosses keeps its
    values: bfloat16 stays bfloat16. The CPU computes in the data types that the model declares.

    Attributes:
        device: Where the partitions for the device run.
        functions: The plans, ready to run, by name; a lone plan is called ``main``.
    """

    def __init__(
        self,
        plan: PartitionPlan | Mapping[str, PartitionPlan],
        backend: Backend | Device | str | None = None,
        compile_fn: CompileFunction | None = None,
    ) -> None:
        """Compiles the partitions for the device, all as functions of one program, and binds those for the CPU.

        Args:
            plan: What `npu_compiler.partition` gave; or several plans by name, whose weights are then held once.
            backend: The device to run on, such as ``MetalBackend()``, ``Device("cuda")`` or its name; when omitted the
                best one of the machine that runs programs for the target of the plan.
            compile_fn: What compiles the partitions for the device, such as `cuda_compiler.compile_subgraph`: called
                with the IR of each, it gives its program. When omitted `npu_compiler.compile` makes one program of all.

        Raises:
            TargetMismatchError: A plan was made for another target.
            UnsupportedOpError: A node does not lower although a callback said so, or PyTorch does not know it either.
            CompileError: Plans disagree about a weight.
            MissingDependencyError: A plan has partitions for the CPU and PyTorch is not installed.
            DeviceError: The device has too little memory, or refuses a kernel.
        """
        super().__init__(plan, backend, partial(_compiled, compile_fn=compile_fn, given=plan))


def _compiled(
    parts: Mapping[str, Mapping[str, Any]],
    target: str,
    compile_fn: CompileFunction | None,
    given: PartitionPlan | Mapping[str, PartitionPlan],
) -> dict[str, CompiledPart]:
    """For each partition its program, and the function of it."""
    if compile_fn is None:
        program = compile(parts, target, device=_compiled_for(given)) if parts else None
        return {name: (program, name) for name in parts} if program is not None else {}
    if not callable(compile_fn):
        raise InputError(f"given a {type(compile_fn).__name__} as compile_fn, expected a function of a partition's IR")
    programs: dict[str, CompiledPart] = {}
    for name, ir in parts.items():
        made = compile_fn(ir)
        if not isinstance(made, CompiledProgram):
            raise InputError(
                f"compile_fn, called for the partition '{name}', returned a {type(made).__name__}, expected a "
                "CompiledProgram, as npu_compiler.compile gives one"
            )
        programs[name] = (made, None)
    return programs


def _compiled_for(given: PartitionPlan | Mapping[str, PartitionPlan]) -> str | None:
    """The device that all partitions are compiled for, as functions of one program; None for the target's default."""
    plans = given.values() if isinstance(given, Mapping) else [given]
    found = dict.fromkeys(plan.compiled_for for plan in plans)
    if len(found) > 1:
        names = ", ".join(name or "the default" for name in found)
        raise InputError(f"given plans for the devices {names}, expected one; give all calls of partition one device")
    return next(iter(found))
