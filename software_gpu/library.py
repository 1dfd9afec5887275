"""Compiles a Metal source to a native library, once for each machine, and places it where the device can run it."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from npu_compiler.errors import KernelCompileError
from software_gpu.cache import load_or_build
from software_gpu.checks import lint
from software_gpu.device_process import place_code
from software_gpu.entry_points import argument_table, fiber_entry, loop_entry
from software_gpu.machine_code import CHECKED_SYMBOLS, KERNEL_SYMBOLS, Image, undefined_symbols
from software_gpu.msl_parser import Kernel, SourceText
from software_gpu.region_code import region_entry, region_shape
from software_gpu.source import preprocess
from software_gpu.statements import UnknownForm
from software_gpu.toolchain import Toolchain, find_toolchain, toolchain_for
from software_gpu.translation import (
    FIBER_PROLOGUE,
    PROLOGUE,
    RED_ZONE,
    REGION_PROLOGUE,
    synchronizing_functions,
    threadgroup_variables,
    translate,
)
from software_gpu.vectorization import dependent_functions

__all__ = ["Argument", "CompiledKernel", "CompiledLibrary", "Execution", "compile_for", "compile_library"]

_CHECK_FLAGS = (
    *("-DMSL_CHECKED", "-fsanitize=thread", "-O1", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-inline-threshold=100000"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
    *("-fsanitize=array-bounds,local-bounds", "-fno-sanitize-trap=all"),
    f"-DMSL_RED_ZONE={RED_ZONE}",
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
        entries: Address, in the device, of the native code for each form it was compiled to: ``loop``, ``fiber``,
            ``region``.
        compile_fibers: Gives the address of the fiber form of a kernel that was compiled to a faster one.
        region_shape: What the region form runs: ``simdgroups``, in one dimension, or ``x_rows``.
        threadgroup_bytes: Static threadgroup memory.
        red_zone_bytes: Of these, what lies between variables so that a checked run sees who reaches beyond one.
        threadgroup_arguments: Indices (with names) of threadgroup memory that the host sizes.
    """

    name: str
    entries: Mapping[str, int]
    compile_fibers: Callable[[str], int]
    region_shape: str
    arguments: tuple[Argument, ...]
    threadgroup_bytes: int
    red_zone_bytes: int
    threadgroup_arguments: Mapping[int, str]

    def on_fibers(self) -> int:
        """Address of its fiber form, which every kernel has; compiled when it is first asked for, as is rare."""
        return self.entries["fiber"] if "fiber" in self.entries else self.compile_fibers(self.name)


@dataclass(frozen=True)
class CompiledLibrary:
    """All kernels of one source.

    Attributes:
        kernels: By name.
        slow_because: What the compiler said of their faster form, if that is why they run on fibers; else empty.
    """

    kernels: Mapping[str, CompiledKernel]
    slow_because: str


_ARGUMENT_NEED = struct.Struct("<IIII")  # msl::ArgumentNeed: kernel, index, bytes, alignment
_THREADGROUP_LENGTH = struct.Struct("<II")  # msl::ThreadgroupLength: kernel, bytes
_NO_KERNEL = 0xFFFFFFFF

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
            fibers = functools.partial(_fiber_address, source, dict(macros))
            _loaded[key] = _load_entry(key, lambda target: _build(source, macros, execution, target, toolchain), fibers)
            _warn_of_fibers(_loaded[key])
        return _loaded[key]


def _fiber_address(source: str, macros: Mapping[str, str], kernel: str) -> int:
    """Where the fiber form of a kernel begins whose library has a faster one."""
    return compile_library(source, macros, execution=Execution.FIBERS).kernels[kernel].entries["fiber"]


def _load_entry(key: str, build: Callable[[Path], bytes], fibers: Callable[[str], int]) -> CompiledLibrary:
    """Loads an entry of the cache; one that does not load, as another machine's, is built again."""
    path, description = load_or_build(key, build)
    try:
        return _load(path, description, fibers)
    except (KernelCompileError, KeyError):  # no library of this machine, or one without what its description tells of
        path.unlink(missing_ok=True)
    path, description = load_or_build(key, build)
    try:
        return _load(path, description, fibers)
    except (KernelCompileError, KeyError) as error:
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


@functools.cache
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
    try:
        synchronizing, dependent = synchronizing_functions(parsed), dependent_functions(parsed)
    except RecursionError as error:
        raise KernelCompileError("the kernel source holds statements that stand too deep in each other") from error
    parts = [translate(parsed), argument_table(parsed.kernels)]
    described = []
    forms: set[str] = set()
    for kernel in parsed.kernels:
        entries = (
            {"fiber": fiber_entry(kernel)}
            if execution is not Execution.FAST
            else _entries(kernel, parsed, synchronizing, dependent)
        )
        parts += entries.values()
        forms |= entries.keys()
        described.append(_describe(kernel, parsed, list(entries), execution))
    return _prologue(forms, execution) + "\n".join(parts), described


def _prologue(forms: set[str], execution: Execution) -> str:
    if "fiber" not in forms:
        return REGION_PROLOGUE
    return FIBER_PROLOGUE if forms == {"fiber"} and execution is not Execution.CHECKED else PROLOGUE


def _entries(kernel: Kernel, source: SourceText, synchronizing: set[str], dependent: set[str]) -> dict[str, str]:
    if kernel.name not in synchronizing:
        return {"loop": loop_entry(kernel, vectorize=kernel.name not in dependent)}
    try:
        region = region_entry(kernel, source, synchronizing, dependent)
    except (UnknownForm, RecursionError):
        return {"fiber": fiber_entry(kernel)}
    return {"region": region}


def _describe(kernel: Kernel, parsed: SourceText, forms: list[str], execution: Execution) -> dict[str, object]:
    variables = sum(len(found) for _, _, found in threadgroup_variables(kernel.body))
    return {
        "red_zone_bytes": RED_ZONE * max(0, variables - 1) if execution is Execution.CHECKED else 0,
        "name": kernel.name,
        "forms": forms,
        "region_shape": region_shape(kernel, parsed),
        "buffers": {p.index: [p.name, p.is_reference] for p in kernel.buffers},
        "threadgroup": {p.index: p.name for p in kernel.parameters if p.role == "threadgroup"},
    }


def _load(path: Path, description: bytes, fibers: Callable[[str], int]) -> CompiledLibrary:
    content = json.loads(description)
    image, address = place_code(path, f"kernels {', '.join(described['name'] for described in content['kernels'])}")
    needs = _argument_needs(image)
    lengths = _threadgroup_lengths(image)
    kernels = {}
    for number, described in enumerate(content["kernels"]):
        arguments = tuple(
            Argument(name, int(index), *needs[number, int(index)], is_reference)
            for index, (name, is_reference) in described["buffers"].items()
        )
        name = described["name"]
        entries = {form: address + image.symbols[f"msl_{form}_{name}"] for form in described["forms"]}
        threadgroup = {int(index): argument for index, argument in described["threadgroup"].items()}
        nbytes, between = lengths.get(number, 0), described["red_zone_bytes"]
        kernels[name] = CompiledKernel(
            name, entries, fibers, described["region_shape"], arguments, nbytes, between, threadgroup
        )
    return CompiledLibrary(kernels, content["slow_because"])


def _argument_needs(image: Image) -> dict[tuple[int, int], tuple[int, int]]:
    needs: dict[tuple[int, int], tuple[int, int]] = {}
    row = image.symbols["msl_arguments"]
    while True:
        kernel, index, nbytes, alignment = _ARGUMENT_NEED.unpack_from(image.content, row)
        if kernel == _NO_KERNEL:
            return needs
        needs[kernel, index] = nbytes, alignment
        row += _ARGUMENT_NEED.size


def _threadgroup_lengths(image: Image) -> dict[int, int]:
    start, length = image.sections.get("msl_lengths", (0, 0))
    return dict(_THREADGROUP_LENGTH.iter_unpack(image.content[start : start + length]))
