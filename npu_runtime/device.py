"""Choosing a device by name, or the best one of the machine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple

from npu_compiler.errors import DeviceError, InputError, MissingDependencyError, NPUError
from npu_runtime.backend import Backend

__all__ = ["DEVICE_NAMES", "Device"]


class _Entry(NamedTuple):
    """Where a backend is defined, and what it runs; `extra` is the optional dependency that brings what it imports."""

    module: str
    attribute: str
    extra: str
    target: str


# Best first: `Device()` takes the first that opens.
_BACKENDS = {
    "metal": _Entry("npu_runtime.metal_backend", "MetalBackend", "", "metal"),
    "cuda": _Entry("cuda_runtime", "CUDABackend", "cuda", "cuda"),
    "software-metal": _Entry("npu_runtime.metal_backend", "MetalBackend", "", "metal"),
}
DEVICE_NAMES = tuple(_BACKENDS)


class Device:
    """A device of this machine.

    Attributes:
        name: Name that selects it: ``metal``, ``software-metal``, ``cuda``, ``cuda:1``.
        target: The compilation target whose programs it runs.
        backend: The opened device; two `Device` of one name share it.
    """

    name: str
    target: str
    backend: Backend

    def __init__(self, which: str | Backend | None = None) -> None:
        """Opens a device.

        Args:
            which: A name, a backend that is already open, or nothing for the best device of the machine: a GPU that
                works, else the software GPU.

        Raises:
            DeviceError: No such device, here or anywhere.
            MissingDependencyError: A package that the device needs is not installed.
            InputError: `which` is something else.
        """
        value: object = which
        if value is not None and not isinstance(value, str | Backend):
            given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise InputError(f"given {given}, expected a backend or a Device, or a device's name; Device() is the best")
        if isinstance(which, Backend):
            self.name, self.backend = which.name, which
        elif which is None:
            self.name, self.backend = _open_best()
        else:
            self.name, self.backend = which, _open(*_parse(which))
        self.target = self.backend.target

    @classmethod
    def of(cls, given: Device | Backend | str | None, target: str | None = None) -> Device:
        """The device that a caller means.

        Args:
            given: A device, a backend that is open, or a device's name; None for the best device of the machine.
            target: The target whose programs the best device has to run; any when omitted.

        Raises:
            DeviceError: There is no such device.
            InputError: It is none of these.
        """
        if isinstance(given, Device):
            return given
        if given is None and target is not None:
            return cls.for_target(target)
        return cls(given)

    @classmethod
    def for_target(cls, target: str) -> Device:
        """The best device of the machine that runs programs of a target.

        Raises:
            DeviceError: There is none.
        """
        name, _ = _open_best(target)
        return cls(name)

    def sibling(self) -> Device:
        """The same device, for executors whose runs overlap with those of this one's.

        Buffers and weights of the one serve on the other. On CUDA a sibling has a stream of its own; devices that do
        one thing at a time give themselves.
        """
        backend = self.backend.sibling()
        return self if backend is self.backend else Device(backend)

    def __repr__(self) -> str:
        return f"Device({self.name!r}: {self.backend.name}, runs target {self.target!r})"


def _parse(which: str) -> tuple[str, int]:
    name, colon, ordinal = which.partition(":")
    if name not in _BACKENDS or (colon and not ordinal.isdecimal()):
        raise DeviceError(
            f"given the device name {which!r}, expected one of {', '.join(DEVICE_NAMES)}, with an index such as "
            "cuda:1 where a machine has several; Device() chooses the best one"
        )
    return name, int(ordinal or 0)


@cache
def _open(name: str, ordinal: int) -> Backend:
    entry = _BACKENDS[name]
    try:
        backend: type[Backend] = getattr(import_module(entry.module), entry.attribute)
        return backend.open(name, ordinal)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'npu-compiler[{entry.extra}]'" if entry.extra else "install npu-compiler again"
        raise MissingDependencyError(f"Device({name!r}) needs the package '{error.name}': {remedy}") from error


def _open_best(target: str | None = None) -> tuple[str, Backend]:
    reasons = []
    for name, entry in _BACKENDS.items():
        if target not in (None, entry.target):
            continue
        try:
            return name, _open(name, 0)
        except NPUError as error:
            reasons.append(f"{name}: {error}")
    wanted = "to run on" if target is None else f"that runs programs for the target {target!r}"
    raise DeviceError("\n  ".join((f"this machine offers no device {wanted}:", *reasons)))
