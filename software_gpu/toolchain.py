"""The C++ compiler of the software GPU: clang, from the `ziglang` package or from the system."""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import KernelCompileError, ToolchainError
from software_gpu.limited_process import COMPILER_LIMITS, run_limited
from software_gpu.processor import MACHINES, Processor, chosen_level, processor
from software_gpu.small_floats import expand_small_floats
from software_gpu.translation import HEADERS

__all__ = ["PACKAGE_ROOT", "Toolchain", "find_toolchain", "toolchain_for"]

PACKAGE_ROOT = Path(__file__).parent
INCLUDE_ROOT = PACKAGE_ROOT / "include"

# Strict IEEE arithmetic with fusing only where the source writes a*b+c: every way of running a kernel rounds alike.
# A literal without suffix is a float in MSL, and half arithmetic rounds after each operation.
# -O3 would unroll the loops over lanes before they are vectorised: up to twice the time to compile, and kernels of rows
# that take up to twice the time to run. Loops whose number of steps is not known are not unrolled at all, which took a
# twelfth of the time to compile and made no kernel faster. (-fno-unroll-loops would leave short ones alone too, which
# then are not vectorised: two to four times the time to run.)
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-ffp-contract=on", "-fno-math-errno", "-fno-trapping-math"),
    *("-mllvm", "-unroll-runtime=false", "-mllvm", "-unroll-allow-partial=false"),
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
_PLAIN_BFLOAT = ("-DMSL_PLAIN_BFLOAT",)  # include/msl_bfloat.h
_REINSTALL = "Reinstall it: pip install --force-reinstall 'npu-compiler[software-gpu]'"
OLDEST_CLANG = 17  # 16 has no arithmetic on __bf16


class _Refusal(KernelCompileError):
    """The compiler read the text to its end, and it is not C++ that it accepts."""


@dataclass(frozen=True)
class Toolchain:
    """A clang that works, and what identifies the code it makes.

    Attributes:
        compiler: Command that compiles C++.
        linker: Command that links a shared object.
        processor: What it compiles for.
        fingerprint: Digest of compiler version, processor, flags and headers; part of every cache key.
        description: For people: compiler, version, where from.
    """

    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    processor: Processor
    fingerprint: str
    description: str

    def preprocess(self, source: str, macros: dict[str, str]) -> str:
        """Expands macros and conditionals; raises KernelCompileError with clang's words."""
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        return self._run([*self.compiler, "-std=c++17", "-E", *defines, "-x", "c++", "-"], source)

    def check_syntax(self, source: str, flags: Sequence[str]) -> str:
        """What clang has to say about a source it refuses; empty when it accepts."""
        headers = self._headers(source, flags)
        command = [*self.compiler, *self._flags(), *flags, "-fsyntax-only", *_including(headers), "-x", "c++", "-"]
        done = _execute(command, source, headers)
        return done.stderr if done.returncode else ""

    def build(self, source: str, target: Path, flags: Sequence[str] = (), *, shared: bool = False) -> None:
        """Compiles C++ text to an object file at `target`, or to a shared object.

        Raises:
            KernelCompileError: The compiler refuses the text.
            ToolchainError: The compiler could not finish: it was killed, or lacks space, memory or permission.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="software-gpu-") as folder:
                code = Path(folder, "kernel.o")
                self.compile(source, code, flags)
                if shared:
                    self._run([*self.linker, "-o", str(target), str(code)], "")
                else:
                    target.write_bytes(code.read_bytes())
        except OSError as error:
            raise ToolchainError(
                f"kernels can't be compiled in {_temporary_folder()}: {error}. Free some space, or name another folder "
                "in TMPDIR"
            ) from error

    def compile(self, source: str, target: Path, flags: Sequence[str] = ()) -> None:
        """Compiles C++ text to an object file; raises as `build` does."""
        expanded = [kind for kind, converts in self._small_floats() if not converts and kind in source]
        if flags:  # another form of the language, or code that reports what it reads
            return self._compile(source, target, flags, expanded)
        try:
            self._compile(source, target, _PLAIN_BFLOAT, [kind for kind in expanded if kind != "bfloat"])
        except _Refusal:
            if "bfloat" not in expanded:
                raise
            self._compile(source, target, flags, expanded)  # it computes in bfloat, or is wrong

    def _compile(self, source: str, target: Path, flags: Sequence[str], expanded: Sequence[str]) -> None:
        """Compiles in one run, or in two where the operations of some types are expanded between them."""
        headers = self._headers(source, flags)
        command = [*self.compiler, *self._flags(), *flags]
        reading = [*_including(headers), "-x", "c++", "-"]
        if expanded:
            unoptimised = ("-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", "-")
            source = expand_small_floats(self._run([*command, *unoptimised, *reading], source, headers), expanded)
            reading = ["-x", "ir", "-"]
        self._run([*command, "-c", "-o", str(target), *reading], source, headers)

    def _headers(self, source: str, flags: Sequence[str]) -> list[int]:
        """The compiled headers, if the source includes them: an open file, or none."""
        return [compiled_headers(self, tuple(flags))] if source.startswith(HEADERS) else []

    def compile_headers(self, flags: Sequence[str]) -> bytes:
        """`msl.h` as clang keeps it after reading, for sources that are compiled with the same flags."""
        with tempfile.TemporaryDirectory(prefix="software-gpu-") as folder:
            target = Path(folder, "headers")
            # The templates that the headers themselves use are made once, not for each kernel.
            reading = ["-fpch-instantiate-templates", "-x", "c++-header", "-"]
            self._run([*self.compiler, *self._flags(), *flags, "-o", str(target), *reading], HEADERS)
            return target.read_bytes()

    def _small_floats(self) -> tuple[tuple[str, bool], ...]:
        """The types that kernels store and clang converts, and whether the processor does it as the headers would."""
        return ("bfloat", False), ("half", self.processor.converts_half)

    def _flags(self) -> list[str]:
        return [*FLAGS, *self.processor.flags, f"-I{INCLUDE_ROOT}"]

    def _run(self, command: Sequence[str], source: str, inherited: Sequence[int] = ()) -> str:
        done = _execute(command, source, inherited)
        if done.returncode == 1 and _is_refusal(done.stderr):
            raise _Refusal(f"the compiler refused the kernel source:\n{_readable(done.stderr)}")
        if done.returncode:
            raise ToolchainError(_failure(done))
        return done.stdout


_headers: dict[tuple[Toolchain, tuple[str, ...]], int] = {}
_headers_lock = threading.Lock()


def compiled_headers(toolchain: Toolchain, flags: tuple[str, ...]) -> int:
    """An open file in memory that holds the compiled headers, made at the first use of a process.

    Reading the headers is half of the time of a small kernel, and thousands include the same. They stay in memory, not
    in the cache: clang trusts such a file, so nobody else may write it, and none is left that belongs to older headers.
    """
    key = toolchain, flags
    with _headers_lock:
        if key not in _headers:
            content = toolchain.compile_headers(flags)
            _headers[key] = os.memfd_create("headers")
            os.write(_headers[key], content)
        return _headers[key]


def _including(headers: Sequence[int]) -> list[str]:
    return [word for file in headers for word in ("-include-pch", f"/proc/self/fd/{file}")]


# Words of the system, not of the language: they say nothing of the source.
_SYSTEM_FAILURES = tuple(
    os.strerror(number)
    for number in (errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EMFILE)
)
_DIAGNOSTIC = re.compile(r"^\S+:\d+:\d+: (fatal )?error: |^fatal error: error in backend", re.MULTILINE)


def _is_refusal(messages: str) -> bool:
    """Whether clang points at something in the text that it was given."""
    return bool(_DIAGNOSTIC.search(messages)) and not any(words in messages for words in _SYSTEM_FAILURES)


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # it tries to write there
        return os.environ.get("TMPDIR", "/tmp")


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    """Why a compiler came to no verdict, and what to do."""
    said = f":\n{_readable(done.stderr)}" if done.stderr.strip() else ""
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = str(-done.returncode)
        return (
            f"the compiler was stopped by the signal {name} before it was done; nothing was kept. Run it again, with "
            f"more free memory if nobody stopped it{said}"
        )
    return (
        f"the compiler failed with status {done.returncode}, which is no verdict on the kernel; nothing was kept. Look "
        f"for free space in {_temporary_folder()} (TMPDIR names another folder), and run `npu doctor`{said}"
    )


def _execute(command: Sequence[str], source: str, inherited: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    try:
        return run_limited(command, source, inherited)
    except OSError as error:
        raise ToolchainError(f"could not start '{command[0]}': {error}. {_REINSTALL}") from error


def _readable(messages: str) -> str:
    """The first errors, without the notes that follow from them."""
    lines = [line for line in messages.splitlines() if not line.startswith("In file included")]
    return "\n".join(lines[:40])


def find_toolchain() -> Toolchain:
    """The machine's clang, for the processor level that is chosen.

    Raises:
        ToolchainError: The system is not Linux on x86-64 or aarch64, has no clang 17 or newer, or can't run the level.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in MACHINES:
        raise ToolchainError(
            f"the software GPU runs on Linux on {' or '.join(MACHINES)}, not on {platform.system()} on {machine}. "
            "On macOS use the Apple GPU: Device('metal')"
        )
    return toolchain_for(chosen_level())


@functools.cache
def toolchain_for(level: str) -> Toolchain:
    """The machine's clang, compiling for a processor level that this machine need not be able to run.

    Raises:
        ToolchainError: There is no clang 17 or newer.
    """
    target = processor(level)
    compiler, linker = _zig_clang(target.machine) or _system_clang(target.machine)
    version = _execute([*compiler, "--version"], "").stdout.splitlines()
    if not version:
        raise ToolchainError(f"'{' '.join(compiler)} --version' failed. {_REINSTALL}")
    parts = [version[0], target.machine, level, *target.flags, *sorted(target.features), *FLAGS]
    headers = [path.read_text() for path in sorted(INCLUDE_ROOT.glob("*.h"))]
    fingerprint = hashlib.sha256("\0".join([*parts, *headers]).encode()).hexdigest()
    return Toolchain(compiler, linker, target, fingerprint, f"{version[0]} ({compiler[0]})")


def _zig_clang(machine: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        return None
    zig = os.path.join(next(iter(found.submodule_search_locations)), "zig")
    # The plain drivers: `zig c++` would first build a C library that kernels have no use for.
    return (zig, "clang", f"--target={machine}-linux-gnu", "-nostdinc"), (zig, "ld.lld", "-shared")


def _system_clang(machine: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for name in ["clang", *(f"clang-{version}" for version in range(30, OLDEST_CLANG - 1, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        found = re.search(r"version (\d+)", _execute([path, "--version"], "").stdout)
        if found and int(found[1]) >= OLDEST_CLANG:
            target = f"--target={machine}-linux-gnu"
            return (path, target, "-nostdinc"), (path, target, "-shared", "-nostdlib")
    raise ToolchainError(
        f"the software GPU compiles kernels with clang {OLDEST_CLANG} or newer, and found none. "
        "Install the extra that brings one: pip install 'npu-compiler[software-gpu]'"
    )
