"""Where the libraries of a CUDA toolkit are: among the packages of this Python, then wherever the system looks."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["load_library"]

_VERSIONS = (13, 12)


def load_library(name: str, folder: str) -> ctypes.CDLL | None:
    """A library of the toolkit, or None where there is none.

    Args:
        name: Such as ``nvrtc``.
        folder: Where NVIDIA's packages for Python have it, in ``nvidia/``.
    """
    for candidate in _candidates(name, folder):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None


def _candidates(name: str, folder: str) -> Iterator[str]:
    for base in map(Path, sys.path):
        for pattern in (f"nvidia/{folder}/lib/lib{name}.so.*", f"nvidia/cu1?/lib/lib{name}.so.*"):
            yield from (str(path) for path in sorted(base.glob(pattern)) if "alt" not in path.name)
    files = [*(f"lib{name}.so.{version}" for version in _VERSIONS), f"lib{name}.so"]
    yield from files
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found
    yield from (f"/usr/local/cuda/lib64/{file}" for file in files)
