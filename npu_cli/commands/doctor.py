"""`npu doctor`: what this machine offers; for what it lacks, what would add it."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuda_runtime import kernel_cache
from cuda_runtime.tuning_results import tuning_directory
from npu_compiler.errors import NPUError
from npu_runtime import Device
from npu_runtime.device import device_names
from software_gpu import cache as software_gpu_cache
from software_gpu.device_process import isolation
from software_gpu.probe import check_storage_types, instructions, kept_fallbacks, repair, slow_kernels_reason
from software_gpu.toolchain import find_toolchain

__all__ = ["execute"]

_SOFTWARE_GPU = "software-metal"
_REPAIR = "`npu doctor --repair` has them compiled anew"
_EXTRAS = {
    "software-gpu": ("ziglang",),
    "torch": ("torch", "pytorch-ir"),
    "llm": ("transformers",),
    "text": ("tokenizers",),
    "examples": ("torchvision", "pillow", "scikit-image"),
}
_CACHES: Mapping[str, Callable[[], Path]] = {
    "kernel cache of the software GPU": software_gpu_cache.cache_directory,
    "kernel cache of CUDA": kernel_cache.cache_directory,
    "tuning results of CUDA": tuning_directory,
}


class _Finding(NamedTuple):
    """One row: `detail` says what was found, or the remedy."""

    subject: str
    works: bool
    detail: str
    fails: bool = False  # what works by another row does not, or nothing can be kept


def execute(args: argparse.Namespace) -> int:
    if args.repair:
        dropped = repair()
        Console().print(f"{dropped} damaged or refused kernels dropped from {software_gpu_cache.cache_directory()}")
    devices = list(_devices())
    found = [*devices, *_software_gpu(devices), *_caches(), *_packages()]
    table = Table(title=f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for heading in ("", "works", "found, or remedy"):
        table.add_column(heading, overflow="fold")
    for subject, works, detail, fails in found:
        table.add_row(
            subject, Text("yes", "green") if works else Text("no", "red" if fails else "yellow"), Text(detail)
        )
    Console().print(table)
    some_device = any(finding.works for finding in devices)
    return 0 if some_device and not any(finding.fails for finding in found) else 1


def _devices() -> Iterator[_Finding]:
    for name in device_names():
        try:
            yield _Finding(f"device {name}", True, Device(name).backend.name)
        except NPUError as error:
            yield _Finding(f"device {name}", False, str(error))


def _software_gpu(devices: Sequence[_Finding]) -> Iterator[_Finding]:
    """What the software GPU is made of; where it is called a device, it must also compute."""
    subject = "compiler of the software GPU"
    called_working = any(finding.subject == f"device {_SOFTWARE_GPU}" and finding.works for finding in devices)
    try:
        yield _Finding(subject, True, find_toolchain().description)
        subject = "processor of the software GPU"
        yield _Finding(subject, True, instructions())
        subject = "arithmetic of the software GPU"
        yield _Finding(subject, True, f"right in {check_storage_types()}")
        subject = "kernels of the software GPU"
        reason = slow_kernels_reason()
    except NPUError as error:
        yield _Finding(subject, False, str(error), fails=called_working)
        return
    kept = kept_fallbacks()
    if reason:
        yield _Finding(subject, False, f"on fibers, slowly; the compiler refused loops: {reason}. {_REPAIR}")
    elif kept:
        yield _Finding(subject, False, f"{len(kept)} in the cache run on fibers, slowly: {kept[0]}. {_REPAIR}")
    else:
        yield _Finding(subject, True, "as loops that are vectorised")
    subject = "process of the software GPU"
    try:
        yield _Finding(subject, True, f"kernels run {isolation()}")
    except NPUError as error:
        yield _Finding(subject, False, str(error), fails=called_working)


def _caches() -> Iterator[_Finding]:
    for subject, folder in _CACHES.items():
        yield _cache(subject, folder())


def _cache(subject: str, folder: Path) -> _Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()]
    except OSError as error:
        remedy = f"{folder}: {error.strerror}; name another folder in NPU_CACHE_DIR"
        return _Finding(subject, False, remedy, fails=True)
    return _Finding(subject, True, f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB")


def _packages() -> Iterator[_Finding]:
    for extra, packages in _EXTRAS.items():
        for package in packages:
            try:
                yield _Finding(f"package {package}", True, version(package))
            except PackageNotFoundError:
                yield _Finding(f"package {package}", False, f"pip install 'npu-compiler[{extra}]'")
