"""What a package says of the devices that it opens, before any of them is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceKind"]


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. An entry point in the group ``npu.devices`` names an object of this; its name is the device's.

    Attributes:
        target: The compilation target whose programs it runs.
        backend: Module and name of its subclass of `Backend`, as ``module:Name``; imported when a device is opened.
        preference: The kind with the highest is the first that `Device()` tries.
        remedy: What to do where a package is missing that the module imports.
    """

    target: str
    backend: str
    preference: int
    remedy: str
