"""`npu doctor`: what this machine offers; for what it lacks, what would add it."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from npu_compiler.errors import NPUError
from npu_runtime import Device
from npu_runtime.checkup import Checkup, Finding
from npu_runtime.device import device_kinds, device_names

__all__ = ["execute"]

_EXTRAS = {
    "software-gpu": ("ziglang",),
    "torch": ("torch", "pytorch-ir"),
    "llm": ("transformers",),
    "text": ("tokenizers",),
    "serve": ("fastapi", "uvicorn", "httptools", "uvloop", "jinja2", "llguidance", "prometheus-client", "aiohttp"),
    "examples": ("torchvision", "pillow", "scikit-image"),
}


def execute(args: argparse.Namespace) -> int:
    checkups = _checkups()
    if args.repair:
        for checkup in checkups.values():
            if checkup.repair is not None:
                Console().print(checkup.repair())
    devices = {name: _device(name) for name in device_names()}
    parts = [part for name, checkup in checkups.items() for part in checkup.findings(devices[name].works)]
    caches = [_cache(subject, place()) for each in checkups.values() for subject, place in each.caches.items()]
    found = [*devices.values(), *parts, *caches, *_extras()]
    table = Table(title=f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for heading in ("", "works", "found, or remedy"):
        table.add_column(heading, overflow="fold")
    for subject, works, detail, fails in found:
        table.add_row(
            subject, Text("yes", "green") if works else Text("no", "red" if fails else "yellow"), Text(detail)
        )
    Console().print(table)
    some_device = any(finding.works for finding in devices.values())
    return 0 if some_device and not any(finding.fails for finding in found) else 1


def _checkups() -> dict[str, Checkup]:
    """What the kinds of devices bring to be looked at, by the device's name."""
    checkups = {}
    for name, kind in device_kinds().items():
        module, _, attribute = kind.checkup.partition(":")
        if module:
            checkups[name] = getattr(import_module(module), attribute)
    return checkups


def _device(name: str) -> Finding:
    try:
        return Finding(f"device {name}", True, Device(name).backend.name)
    except NPUError as error:
        return Finding(f"device {name}", False, str(error))


def _cache(subject: str, folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            sizes = [*_sizes(folder)]
    except OSError as error:
        remedy = f"{folder}: {error.strerror}; name another folder in NPU_CACHE_DIR"
        return Finding(subject, False, remedy, fails=True)
    return Finding(subject, True, f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB")


def _sizes(folder: Path) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process may have removed it by now
                if entry.is_file():
                    yield entry.stat().st_size


def _extras() -> Iterator[Finding]:
    """The extras, by the packages that each brings itself."""
    for extra, packages in _EXTRAS.items():
        found, missing = [], []
        for package in packages:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                missing.append(package)
        remedy = f"no {', '.join(missing)}: pip install 'npu-compiler[{extra}]'"
        yield Finding(f"extra {extra}", not missing, remedy if missing else ", ".join(found))
