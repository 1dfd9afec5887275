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
        checkup: Module and name of a `Checkup`, for `npu doctor`; empty where it is enough to know whether one opens.
        tensors: What PyTorch calls such a device (``torch.device.type``), where its tensors are read where they lie;
            empty where they are copied.
        tunes: Whether its executors have choices to time (`Executor.tune`).
    """

    target: str
    backend: str
    preference: int
    remedy: str
    checkup: str = ""
    tensors: str = ""
    tunes: bool = False
