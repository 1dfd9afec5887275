"""A folder, served by several processes, each on a device of its own, behind one server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from npu_runtime.device import Device
from npu_text.serving.replicas import Replicas
from npu_text.serving.server import ServerOptions, needing_extra, open_app

__all__ = ["open_front"]


@contextmanager
def open_front(folder: Path, devices: Sequence[str], options: ServerOptions) -> Iterator[Any]:
    """The application before processes that serve a folder, one on each of some devices; they end with the context.

    Args:
        folder: As for `open_app`.
        devices: Their names; one that is named twice gets two processes.
        options: As for `open_app`.

    Raises:
        MissingDependencyError: The extra ``serve`` is not installed.
        DeviceError: A process does not start.
    """
    with needing_extra():
        from npu_text.serving.front import make_front
        from npu_text.serving.guard import GuardOptions
    own = replace(options, keys=())  # who stands before them checks these
    replicas = Replicas([(f"the server on {device}", partial(_open, folder, device, own)) for device in devices])
    replicas.start()
    try:
        guard = GuardOptions(keys=options.keys, body=options.body)
        yield make_front(replicas, replace(guard, requests=guard.requests * len(devices)))
    finally:
        replicas.stop()


def _open(folder: Path, device: str, options: ServerOptions) -> Any:
    return open_app(folder, Device(device), options)
