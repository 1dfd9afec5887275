"""Choosing a device by name, or the best one of the machine."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module

from npu_compiler.errors import DeviceError, InputError, MissingDependencyError, NPUError
from npu_compiler.plugins import entry_points_of, load
from npu_runtime.backend import Backend
from npu_runtime.device_kind import DeviceKind

__all__ = ["Device", "backend_class", "device_kinds", "device_names"]

_GROUP = "npu.devices"


def device_names() -> tuple[str, ...]:
    """What the kinds of devices are called that installed packages offer, those first that `Device()` tries first."""
    return tuple(sorted(entry_points_of(_GROUP), key=_preference, reverse=True))


def device_kinds() -> dict[str, DeviceKind]:
    """The kinds of devices that installed packages offer, by name, in the order of `device_names`; without what does
    not load.
    """
    kinds = {}
    for name in device_names():
        with suppress(NPUError):  # why it does not load is told where it is opened
            kinds[name] = _kind(name)
    return kinds


def backend_class(name: str) -> type[Backend]:
    """The class of a name by which an installed package opens its devices.

    Raises:
        AttributeError: There is none.
    """
    for device in entry_points_of(_GROUP):
        module, _, found = _kind(device).backend.partition(":")
        if found == name:
            backend: type[Backend] = getattr(import_module(module), found)
            return backend
    raise AttributeError(f"no installed package opens its devices by a class '{name}'")


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

    def sibling(self, overlapping: int = 1) -> Device:
        """The same device, for executors whose runs overlap with those of this one's.

        Buffers and weights of the one serve on the other. On CUDA a sibling has a stream of its own; devices that do
        one thing at a time give themselves.

        Args:
            overlapping: How many executors will keep the device busy at once. With 2 and more, what a program leaves to
                the device is chosen for the work that all of them get done, where tuning has timed the options, and no
                longer for the time of one run by itself, which then takes longer.

        Raises:
            InputError: It is less than 1.
        """
        if not isinstance(overlapping, int) or overlapping < 1:
            raise InputError(
                f"given {overlapping!r:.60} for overlapping, expected how many executors run at once, 1 or more"
            )
        backend = self.backend.sibling(overlapping)
        return self if backend is self.backend else Device(backend)

    def __repr__(self) -> str:
        return f"Device({self.name!r}: {self.backend.name}, runs target {self.target!r})"


def _parse(which: str) -> tuple[str, int]:
    name, colon, ordinal = which.partition(":")
    if name not in entry_points_of(_GROUP) or (colon and not ordinal.isdecimal()):
        raise DeviceError(
            f"given the device name {which!r}, expected one of {', '.join(device_names())}, with an index such as ':1' "
            "behind it where a machine has several; Device() chooses the best one"
        )
    return name, int(ordinal or 0)


@cache
def _kind(name: str) -> DeviceKind:
    kind = load(_GROUP, name)
    if not isinstance(kind, DeviceKind):
        raise DeviceError(f"the entry point '{name}' in '{_GROUP}' names {kind!r:.80}, expected a DeviceKind")
    return kind


def _preference(name: str) -> int:
    try:
        return _kind(name).preference
    except NPUError:
        return -1  # why it does not load is told where it is opened


@cache
def _open(name: str, ordinal: int) -> Backend:
    kind = _kind(name)
    module, _, attribute = kind.backend.partition(":")
    try:
        backend: type[Backend] = getattr(import_module(module), attribute)
        return backend.open(name, ordinal)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"Device({name!r}) needs the package '{error.name}': {kind.remedy}") from error


def _open_best(target: str | None = None) -> tuple[str, Backend]:
    reasons = []
    for name in device_names():
        try:
            if target in (None, _kind(name).target):
                return name, _open(name, 0)
        except NPUError as error:
            reasons.append(f"{name}: {error}")
    wanted = "to run on" if target is None else f"that runs programs for the target {target!r}"
    raise DeviceError("\n  ".join((f"this machine offers no device {wanted}:", *reasons)))
