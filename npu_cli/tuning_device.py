"""The device that tuning is for."""

from __future__ import annotations

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, TargetMismatchError
from npu_runtime import Device

__all__ = ["TUNED_TARGET", "open_tuning_device"]

TUNED_TARGET = "cuda"


def open_tuning_device(program: CompiledProgram, name: str | None) -> Device:
    """The CUDA device of that name, or the best one.

    Raises:
        TargetMismatchError: The program was compiled for another target.
        InputError: The device is of another target.
        DeviceError: There is no such device; the message says what CUDA lacks here.
    """
    if program.target != TUNED_TARGET:
        raise TargetMismatchError(
            f"'{program.model}' was compiled for the target '{program.target}', and only programs for "
            f"'{TUNED_TARGET}' have choices to tune; compile it again: npu compile IR.json --target {TUNED_TARGET}"
        )
    if name is None:
        return Device.for_target(TUNED_TARGET)
    if name.partition(":")[0] != TUNED_TARGET:
        raise InputError(f"given --device {name}, expected {TUNED_TARGET} or {TUNED_TARGET}:1, which tuning is for")
    return Device(name)
