"""Processor levels: the instructions that compiled kernels may use.

`NPU_SOFTWARE_GPU_CPU` chooses one; without it kernels are compiled for the machine's own processor.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_compiler.errors import ToolchainError

__all__ = ["ENVIRONMENT_VARIABLE", "LEVELS", "NATIVE", "Processor", "chosen_level", "machine_features", "processor"]

ENVIRONMENT_VARIABLE = "NPU_SOFTWARE_GPU_CPU"
NATIVE = "native"


@dataclass(frozen=True)
class Processor:
    """What kernels are compiled for.

    Attributes:
        name: As `NPU_SOFTWARE_GPU_CPU` spells it.
        machine: ``x86_64`` or ``aarch64``.
        flags: For clang.
        features: What the processor must have, as `/proc/cpuinfo` spells it.
        converts_half: Whether it has instructions between half and float.
        fuses: Whether it multiplies and adds in one instruction; without it `a*b+c` rounds twice.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]
    converts_half: bool
    fuses: bool


# Half arithmetic goes through float everywhere: with instructions of its own, a*b+c would round otherwise.
_X86_FLAGS = ("-mno-red-zone", "-mno-avx512fp16")
_ARM_FLAGS = ("-mno-outline-atomics",)  # otherwise atomics are calls of a library
_X86_FEATURES = {
    "x86-64": "",
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
_ARM_FEATURES = {
    "generic": "fp asimd",
    "neoverse-n1": "fp asimd atomics crc32 asimdrdm asimddp lrcpc dcpop",
    "apple-m1": "fp asimd atomics crc32 asimdrdm asimddp lrcpc ilrcpc dcpop jscvt fcma sha3 sha512 asimdfhm flagm",
}


def _x86(name: str) -> Processor:
    names = list(_X86_FEATURES)
    words = " ".join(_X86_FEATURES[level] for level in names[: names.index(name) + 1]).split()
    return Processor(name, "x86_64", (f"-march={name}", *_X86_FLAGS), frozenset(words), "f16c" in words, "fma" in words)


def _arm(name: str) -> Processor:
    features = frozenset(_ARM_FEATURES[name].split())
    return Processor(name, "aarch64", (f"-mcpu={name}+nofp16", *_ARM_FLAGS), features, True, True)


LEVELS = {level.name: level for level in [*map(_x86, _X86_FEATURES), *map(_arm, _ARM_FEATURES)]}
MACHINES = ("x86_64", "aarch64")


def chosen_level() -> str:
    """The level that kernels are compiled for and run at.

    Raises:
        ToolchainError: There is no such level, or this machine's processor can't run it.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or NATIVE
    machine = platform.machine()
    runnable = [NATIVE, *(level.name for level in LEVELS.values() if not missing_features(level))]
    if name not in LEVELS and name != NATIVE:
        raise ToolchainError(
            f"{ENVIRONMENT_VARIABLE} is '{name}', which is no processor level. This machine runs {', '.join(runnable)}"
        )
    if name not in runnable:
        missing = missing_features(LEVELS[name])
        raise ToolchainError(
            f"{ENVIRONMENT_VARIABLE} is '{name}', and this machine ({machine}) can't run such code: it lacks "
            f"{' '.join(missing)}. It runs {', '.join(runnable)}"
        )
    return name


def processor(level: str) -> Processor:
    """What code of a level is compiled for, tuned for this machine if that runs it; `native` is the machine itself."""
    if level != NATIVE:
        known = LEVELS[level]
        # The level's instructions, in the order that suits this machine.
        tuning = () if missing_features(known) or known.machine != "x86_64" else ("-mtune=native",)
        return replace(known, flags=(*known.flags, *tuning))
    features = machine_features()
    if platform.machine() == "aarch64":
        return Processor(NATIVE, "aarch64", ("-mcpu=native+nofp16", *_ARM_FLAGS), features, True, True)
    flags = ("-march=native", *_X86_FLAGS)
    return Processor(NATIVE, platform.machine(), flags, features, "f16c" in features, "fma" in features)


def missing_features(level: Processor) -> Sequence[str]:
    """What this machine's processor lacks for a level; empty when it can run it."""
    if level.machine != platform.machine():
        return [f"the architecture {level.machine}"]
    return sorted(level.features - machine_features())


@functools.cache
def machine_features() -> frozenset[str]:
    """The instructions that this machine's processor has, as `/proc/cpuinfo` spells them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
