"""What plans leave that run on this machine's processor, thread by thread, as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from npu_compiler.artifact.plan import ExecutionPlan, Role
from npu_compiler.tensor.layout import BufferSpec
from tests.support.coded_cache import host_numbers
from tests.support.host_kernels import run_plan_on_host

__all__ = ["outputs_on_host", "stored_on_host"]


def outputs_on_host(
    plan: ExecutionPlan, given: Iterable[torch.Tensor], folder: Path, backwards: bool = False
) -> tuple[NDArray[np.uint8], list[NDArray[np.float64]]]:
    """The record of faults, which is zeros where there are none, and the outputs with the strides that they have.

    Args:
        plan: What to run, of one option for each choice.
        given: The inputs, in the plan's order.
        folder: For what is compiled.
        backwards: Whether the last threads come first.
    """
    stored = {name: array.view(np.uint8) for name, array in stored_on_host(plan, given).items()}
    found, kept = run_plan_on_host(plan, stored, folder, backwards), dict(plan.state)
    return found[Role.FAULTS.value], [
        _as_laid_out(found[kept.get(spec.name, spec.name)].view(_numpy_type(spec)).astype(np.float64), spec)
        for spec in plan.outputs
    ]


def stored_on_host(plan: ExecutionPlan, given: Iterable[torch.Tensor]) -> dict[str, NDArray[Any]]:
    """Inputs, in the plan's order, in the types that they are stored in."""
    pairs = zip(plan.inputs, given, strict=True)
    return {spec.name: host_numbers(tensor).astype(_numpy_type(spec)) for spec, tensor in pairs}


def _numpy_type(spec: BufferSpec) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, spec.dtype.name, spec.dtype.name))


def _as_laid_out(numbers: NDArray[np.float64], spec: BufferSpec) -> NDArray[np.float64]:
    strides = [stride * numbers.itemsize for stride in spec.layout.strides]
    return np.lib.stride_tricks.as_strided(numbers, spec.shape, strides)
