"""The words of CUDA's programs: what an option requires of a device, and the library's routines."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["CLUSTERS", "LIBRARY", "LIBRARY_MATMUL", "TENSOR_CORES", "WARPGROUPS", "Architecture", "architecture"]
__all__ += ["read_architecture", "stricter"]

LIBRARY = "cublas"  # the library is installed
LIBRARY_MATMUL = "matmul"  # its routine: a product of matrices, many of them at a time
_ARCHITECTURE = re.compile(r"sm_([0-9]+)([0-9])(a?)")


class Architecture(NamedTuple):
    """Devices that an option is for.

    Attributes:
        capability: Compute capability times ten.
        exactly: Whether it is for no later capability: instructions that only this one has.
    """

    capability: int
    exactly: bool


def architecture(capability: int, exactly: bool = False) -> str:
    """The name of an architecture: ``sm_90``, or ``sm_90a`` for exactly this one."""
    return f"sm_{capability}{'a' if exactly else ''}"


def read_architecture(name: str) -> Architecture | None:
    """The inverse of `architecture`; None where it is no such name."""
    found = _ARCHITECTURE.fullmatch(name)
    return None if found is None else Architecture(int(found[1] + found[2]), bool(found[3]))


def stricter(one: str, other: str) -> str:
    """Of what two options require, architectures or nothing, that which fewer devices have, who have the other, too."""
    return max(one, other, key=lambda name: read_architecture(name) or Architecture(0, False))


CLUSTERS = architecture(90)  # blocks that reach each other's shared memory, and early launches
TENSOR_CORES = architecture(80)  # products of all 16-bit types on tensor cores
WARPGROUPS = architecture(90, exactly=True)  # products by warpgroups
