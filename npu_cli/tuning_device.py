"""The devices that tuning is for: those whose kinds say that they time what a compiler leaves to them."""

from __future__ import annotations

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, TargetMismatchError
from npu_runtime import Device
from npu_runtime.device import device_kinds

__all__ = ["open_tuning_device", "tuned_target"]


def tuned_target() -> str:
    """The target of the first kind of device that tunes.

    Raises:
        InputError: No installed package brings one.
    """
    return next(iter(_tuned().values()))


def open_tuning_device(program: CompiledProgram, name: str | None) -> Device:
    """The device of that name, or the best one that tunes programs of the program's target.

    Raises:
        TargetMismatchError: The program was compiled for a target that leaves nothing to its devices.
        InputError: The device is of a kind that does not tune.
        DeviceError: There is no such device; the message says what is lacking here.
    """
    tuned = _tuned()
    targets = list(dict.fromkeys(tuned.values()))
    if program.target not in targets:
        raise TargetMismatchError(
            f"'{program.model}' was compiled for the target '{program.target}', and only programs for "
            f"{' and '.join(map(repr, targets))} have choices to tune; compile it again: npu compile IR.json --target "
            f"{targets[0]}"
        )
    if name is None:
        return Device.for_target(program.target)
    if name.partition(":")[0] not in tuned:
        expected = ", ".join(f"{kind} or {kind}:1" for kind in tuned)
        raise InputError(f"given --device {name}, expected {expected}, which tuning is for")
    return Device(name)


def _tuned() -> dict[str, str]:
    """The kinds of devices that tune, by name, with the targets whose programs they run."""
    tuned = {name: kind.target for name, kind in device_kinds().items() if kind.tunes}
    if not tuned:
        raise InputError("no installed package brings a device that can be tuned; tuning is for those that choose")
    return tuned
