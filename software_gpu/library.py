"""Compiles a Metal source to a native library, once for each machine, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from npu_compiler.errors import KernelCompileError
from software_gpu.cache import load_or_build
from software_gpu.checks import lint
from software_gpu.entry_points import argument_table, fiber_entry, loop_entry
from software_gpu.linking import CHECKED_SYMBOLS, KERNEL_SYMBOLS, undefined_symbols
from software_gpu.msl_parser import Kernel, SourceText
from software_gpu.native_runtime import load_runtime
from software_gpu.region_code import region_entry, region_shape
from software_gpu.source import preprocess
from software_gpu.statements import UnknownForm
from software_gpu.toolchain import Toolchain, find_toolchain, toolchain_for
from software_gpu.translation import PROLOGUE, synchronizing_functions, translate
from software_gpu.vectorization import dependent_functions

__all__ = ["Argument", "CompiledKernel", "CompiledLibrary", "Execution", "compile_for", "compile_library"]

_CHECK_FLAGS = (
    *("-DMSL_CHECKED", "-fsanitize=thread", "-O1", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
)


class Execution(Enum):
    """FAST: loops and regions. FIBERS: the reference semantics. CHECKED: on fibers, every access looked at."""

    FAST = "fast"
    FIBERS = "fibers"
    CHECKED = "checked"


@dataclass(frozen=True)
class Argument:
    """A buffer that a kernel needs: its index, its name, and how many bytes at which alignment."""

    name: str
    index: int
    bytes: int
    alignment: int
    is_reference: bool


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to run.

    Attributes:
        entries: Address of the native code for each form it has: ``loop``, ``fiber``, ``region``.
        region_shape: What the region form runs: ``simdgroups``, in one dimension, or ``x_rows``.
        threadgroup_bytes: Static threadgroup memory.
        threadgroup_arguments: Indices (with names) of threadgroup memory that the host sizes.
    """

    name: str
    entries: Mapping[str, int]
    region_shape: str
    arguments: tuple[Argument, ...]
    threadgroup_bytes: int
    threadgroup_arguments: Mapping[int, str]


@dataclass(frozen=True)
class CompiledLibrary:
    """All kernels of one source.

    Attributes:
        kernels: By name.
        handle: Keeps their code loaded.
        slow_because: What the compiler said of their faster form, if that is why they run on fibers; else empty.
    """

    kernels: Mapping[str, CompiledKernel]
    handle: ctypes.CDLL
    slow_because: str


class _ArgumentNeed(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint) for name in ("kernel", "index", "bytes", "alignment"))


class _ThreadgroupLength(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_uint), ("bytes", ctypes.c_uint))


_loaded: dict[str, CompiledLibrary] = {}
_locks: dict[str, threading.Lock] = {}
_registry_lock = threading.Lock()


def compile_library(
    source: str, macros: Mapping[str, str], *, execution: Execution = Execution.FAST
) -> CompiledLibrary:
    """The native library of a Metal source, from memory, from disk or freshly compiled. Safe to call from threads.

    Warns, once a process for each source, where its kernels run on fibers because their faster form does not compile.

    Args:
        source: Metal Shading Language; the only includes are Metal's own.
        macros: Preprocessor macros.
        execution: How its kernels are to run.

    Raises:
        KernelCompileError: The source is not what clang, or Metal, accepts.
        ToolchainError: There is no compiler, or no place to keep what it makes.
    """
    toolchain = find_toolchain()
    key = _key(source, macros, execution, toolchain)
    with _registry_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _loaded:
            _loaded[key] = _load_entry(key, lambda target: _build(source, macros, execution, target, toolchain))
            _warn_of_fibers(_loaded[key])
        return _loaded[key]


def _load_entry(key: str, build: Callable[[Path], bytes]) -> CompiledLibrary:
    """Loads an entry of the cache; one that does not load, as another machine's, is built again."""
    path, description = load_or_build(key, build)
    try:
        return _load(path, description)
    except (OSError, AttributeError):  # no library of this machine, or one without what its description tells of
        path.unlink(missing_ok=True)
    path, description = load_or_build(key, build)
    try:
        return _load(path, description)
    except (OSError, AttributeError) as error:
        names = ", ".join(kernel["name"] for kernel in json.loads(description)["kernels"])
        raise KernelCompileError(f"the compiled kernel '{names}' does not load: {error}") from error


def _warn_of_fibers(library: CompiledLibrary) -> None:
    if library.slow_because:
        warnings.warn(
            f"the kernels {', '.join(library.kernels)} run on fibers, many times slower than they might: the compiler "
            f"refused their faster form ({library.slow_because}). Install another compiler (`npu doctor` names this "
            "one), or report it with the kernels' source",
            RuntimeWarning,
            stacklevel=2,
        )


def _key(source: str, macros: Mapping[str, str], execution: Execution, toolchain: Toolchain) -> str:
    parts = [toolchain.fingerprint, _translator_digest(), source, json.dumps(sorted(macros.items()))]
    return hashlib.sha256("\0".join([*parts, execution.value]).encode()).hexdigest()


def _translator_digest() -> str:
    """Digest of the Python that writes C++, so that a new version of it makes new entries."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


def compile_for(level: str, source: str, macros: Mapping[str, str], *, execution: Execution = Execution.FAST) -> None:
    """Compiles a source for a processor level, which this machine need not be able to run.

    Raises:
        KernelCompileError: As `compile_library` does; also where its kernels would run on fibers for no other reason
            than that the compiler refuses their faster form.
    """
    toolchain = toolchain_for(level)
    key = _key(source, macros, execution, toolchain)
    _, description = load_or_build(key, lambda target: _build(source, macros, execution, target, toolchain))
    slow_because = json.loads(description)["slow_because"]
    if slow_because:
        raise KernelCompileError(f"for {level} the compiler refused the faster form of the kernels: {slow_because}")


def _build(source: str, macros: Mapping[str, str], execution: Execution, target: Path, toolchain: Toolchain) -> bytes:
    parsed = preprocess(source, macros)
    problems = list(lint(parsed))
    if problems:
        raise KernelCompileError("Metal would refuse the kernel source:\n" + "\n".join(problems))
    flags = _CHECK_FLAGS if execution is Execution.CHECKED else ()
    code, kernels = generate(parsed, execution)
    slow_because = ""
    try:
        toolchain.build(code, target, flags)
    except KernelCompileError as error:
        if execution is not Execution.FAST:
            raise
        # On fibers the kernel is compiled as it was written, so what clang says then is about the author's own text.
        code, kernels = generate(parsed, Execution.FIBERS)
        toolchain.build(code, target, flags)
        slow_because = _first_error(error)
    _refuse_foreign_calls(target, parsed, CHECKED_SYMBOLS if execution is Execution.CHECKED else KERNEL_SYMBOLS)
    return json.dumps({"kernels": kernels, "slow_because": slow_because}).encode()


def _refuse_foreign_calls(target: Path, parsed: SourceText, provided: frozenset[str]) -> None:
    foreign = [name for name in undefined_symbols(target.read_bytes()) if name not in provided]
    if foreign:
        raise KernelCompileError(
            f"the compiled kernel '{_names(parsed.kernels)}' needs '{', '.join(foreign)}', which nothing provides. "
            "Kernels may call what they define and Metal's own functions"
        )


def _names(kernels: Sequence[Kernel]) -> str:
    return ", ".join(kernel.name for kernel in kernels)


def _first_error(error: KernelCompileError) -> str:
    lines = str(error).splitlines()
    return next((line for line in lines if "error:" in line), lines[0]).strip()


def generate(parsed: SourceText, execution: Execution = Execution.FAST) -> tuple[str, list[dict[str, object]]]:
    """The C++ of a library, and what the host must know of each kernel."""
    synchronizing, dependent = synchronizing_functions(parsed), dependent_functions(parsed)
    parts = [PROLOGUE + translate(parsed), argument_table(parsed.kernels)]
    described = []
    for kernel in parsed.kernels:
        entries = (
            {"fiber": fiber_entry(kernel)}
            if execution is not Execution.FAST
            else _entries(kernel, parsed, synchronizing, dependent)
        )
        parts += entries.values()
        described.append(_describe(kernel, list(entries)))
    return "\n".join(parts), described


def _entries(kernel: Kernel, source: SourceText, synchronizing: set[str], dependent: set[str]) -> dict[str, str]:
    if kernel.name not in synchronizing:
        return {"loop": loop_entry(kernel, vectorize=kernel.name not in dependent)}
    try:
        region = region_entry(kernel, source, synchronizing, dependent)
    except UnknownForm:
        return {"fiber": fiber_entry(kernel)}
    return {"fiber": fiber_entry(kernel, small=True), "region": region}


def _describe(kernel: Kernel, forms: list[str]) -> dict[str, object]:
    return {
        "name": kernel.name,
        "forms": forms,
        "region_shape": region_shape(kernel),
        "buffers": {p.index: [p.name, p.is_reference] for p in kernel.buffers},
        "threadgroup": {p.index: p.name for p in kernel.parameters if p.role == "threadgroup"},
    }


def _load(path: Path, description: bytes) -> CompiledLibrary:
    load_runtime()
    handle = ctypes.CDLL(str(path))
    needs = _argument_needs(handle)
    lengths = _threadgroup_lengths(handle)
    kernels = {}
    content = json.loads(description)
    for number, described in enumerate(content["kernels"]):
        arguments = tuple(
            Argument(name, int(index), *needs[number, int(index)], is_reference)
            for index, (name, is_reference) in described["buffers"].items()
        )
        name = described["name"]
        entries = {form: _address(handle, f"msl_{form}_{name}") for form in described["forms"]}
        threadgroup = {int(index): argument for index, argument in described["threadgroup"].items()}
        kernels[name] = CompiledKernel(
            name, entries, described["region_shape"], arguments, lengths.get(number, 0), threadgroup
        )
    return CompiledLibrary(kernels, handle, content["slow_because"])


def _address(handle: ctypes.CDLL, symbol: str) -> int:
    address = ctypes.cast(getattr(handle, symbol), ctypes.c_void_p).value
    return address or 0


def _argument_needs(handle: ctypes.CDLL) -> dict[tuple[int, int], tuple[int, int]]:
    needs: dict[tuple[int, int], tuple[int, int]] = {}
    table = ctypes.cast(handle.msl_arguments, ctypes.POINTER(_ArgumentNeed))
    row = 0
    while table[row].kernel != 0xFFFFFFFF:
        needs[table[row].kernel, table[row].index] = table[row].bytes, table[row].alignment
        row += 1
    return needs


def _threadgroup_lengths(handle: ctypes.CDLL) -> dict[int, int]:
    begin = ctypes.POINTER(_ThreadgroupLength)()
    handle.msl_threadgroup_lengths.restype = ctypes.c_ulong
    count = handle.msl_threadgroup_lengths(ctypes.byref(begin))
    return {begin[i].kernel: begin[i].bytes for i in range(count)}
