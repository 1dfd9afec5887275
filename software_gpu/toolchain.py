"""The C++ compiler of the software GPU: clang, from the `ziglang` package or from the system."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import KernelCompileError, ToolchainError
from software_gpu.limited_process import COMPILER_LIMITS, run_limited

__all__ = ["PACKAGE_ROOT", "Toolchain", "find_toolchain"]

PACKAGE_ROOT = Path(__file__).parent
INCLUDE_ROOT = PACKAGE_ROOT / "include"

# Strict IEEE arithmetic with fusing only where the source writes a*b+c: every way of running a kernel rounds alike.
# A literal without suffix is a float in MSL, and half arithmetic rounds after each operation.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-ffp-contract=on", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"),
    *(
        "-fno-stack-protector",
        "-fno-strict-aliasing",
        "-fno-threadsafe-statics",
        "-fvisibility=hidden",
        "-Wno-user-defined-literals",
    ),
    *COMPILER_LIMITS,
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-cl-single-precision-constant"),
)
MACHINES = {"x86_64": ("-march=native", "-mno-red-zone"), "aarch64": ("-mcpu=native",)}
OLDEST_CLANG = 17  # 16 has no arithmetic on __bf16


@dataclass(frozen=True)
class Toolchain:
    """A clang that works, and what identifies the code it makes.

    Attributes:
        compiler: Command that compiles C++.
        linker: Command that links a shared object.
        fingerprint: Digest of compiler version, machine, CPU features, flags and headers; part of every cache key.
        description: For people: compiler, version, where from.
    """

    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    fingerprint: str
    description: str

    def preprocess(self, source: str, macros: dict[str, str]) -> str:
        """Expands macros and conditionals; raises KernelCompileError with clang's words."""
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        return self._run([*self.compiler, "-std=c++17", "-E", *defines, "-x", "c++", "-"], source)

    def check_syntax(self, source: str, flags: Sequence[str]) -> str:
        """What clang has to say about a source it refuses; empty when it accepts."""
        command = [*self.compiler, *self._flags(), *flags, "-fsyntax-only", "-x", "c++", "-"]
        done = _execute(command, source)
        return done.stderr if done.returncode else ""

    def build(self, source: str, target: Path, flags: Sequence[str] = ()) -> None:
        """Compiles C++ text to a shared object at `target`, which must not be in use."""
        with tempfile.TemporaryDirectory(prefix="software-gpu-") as folder:
            code = Path(folder, "kernel.o")
            self._run([*self.compiler, *self._flags(), *flags, "-c", "-o", str(code), "-x", "c++", "-"], source)
            self._run([*self.linker, "-o", str(target), str(code)], "")

    def _flags(self) -> list[str]:
        return [*FLAGS, *MACHINES[platform.machine()], f"-I{INCLUDE_ROOT}"]

    def _run(self, command: Sequence[str], source: str) -> str:
        done = _execute(command, source)
        if done.returncode:
            raise KernelCompileError(f"the compiler refused the kernel source:\n{_readable(done.stderr)}")
        return done.stdout


def _execute(command: Sequence[str], source: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_limited(command, source)
    except OSError as error:
        raise ToolchainError(f"could not start '{command[0]}': {error}. Reinstall the package 'ziglang'") from error


def _readable(messages: str) -> str:
    """The first errors, without the notes that follow from them."""
    lines = [line for line in messages.splitlines() if not line.startswith("In file included")]
    return "\n".join(lines[:40])


@functools.cache
def find_toolchain() -> Toolchain:
    """The machine's clang.

    Raises:
        ToolchainError: The system is not Linux on x86-64 or aarch64, or has no clang 17 or newer.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in MACHINES:
        raise ToolchainError(
            f"the software GPU runs on Linux on {' or '.join(MACHINES)}, not on {platform.system()} on {machine}. "
            "On macOS use the Apple GPU: Device('metal')"
        )
    compiler, linker = _zig_clang(machine) or _system_clang()
    version = _execute([*compiler, "--version"], "").stdout.splitlines()
    if not version:
        raise ToolchainError(f"'{' '.join(compiler)} --version' failed. Reinstall the package 'ziglang'")
    parts = [version[0], machine, _cpu_features(), *FLAGS, *(path.read_text() for path in sorted(_headers()))]
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Toolchain(compiler, linker, fingerprint, f"{version[0]} ({compiler[0]})")


def _headers() -> list[Path]:
    return list(INCLUDE_ROOT.glob("*.h"))


def _zig_clang(machine: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        return None
    zig = os.path.join(next(iter(found.submodule_search_locations)), "zig")
    # The plain drivers: `zig c++` would first build a C library that kernels have no use for.
    return (zig, "clang", f"--target={machine}-linux-gnu", "-nostdinc"), (zig, "ld.lld", "-shared")


def _system_clang() -> tuple[tuple[str, ...], tuple[str, ...]]:
    for name in ["clang", *(f"clang-{version}" for version in range(30, OLDEST_CLANG - 1, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        found = re.search(r"version (\d+)", _execute([path, "--version"], "").stdout)
        if found and int(found[1]) >= OLDEST_CLANG:
            return (path, "-nostdinc"), (path, "-shared", "-nostdlib")
    raise ToolchainError(
        f"the software GPU compiles kernels with clang {OLDEST_CLANG} or newer, and found none. "
        "Install the package 'ziglang' (pip install ziglang), which brings one"
    )


def _cpu_features() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
