"""Compiled kernels, kept in a directory that processes share: keyed by source, options, compiler and architecture."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cuda_runtime.capability import architecture_name
from cuda_runtime.nvrtc import OPTIONS, compile_kernel, nvrtc_version
from npu_compiler.artifact.plan import KernelSource

__all__ = ["cache_directory", "compiled_kernels", "write_entry"]

_DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Where compiled kernels are kept: NPU_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("NPU_CACHE_DIR")
    if chosen:
        return Path(chosen, "cuda")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "npu-compiler", "cuda")


def compiled_kernels(kernels: Sequence[KernelSource], architecture: int) -> list[bytes]:
    """Machine code of each kernel, from the cache or compiled in parallel.

    Args:
        kernels: The kernels.
        architecture: Compute capability times ten.

    Raises:
        KernelCompileError: A kernel was refused.
        MissingDependencyError: A kernel must be compiled, and the compiler is not installed.
    """
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(lambda kernel: _load_or_compile(kernel, architecture), kernels))


def _load_or_compile(kernel: KernelSource, architecture: int) -> bytes:
    version = nvrtc_version()
    described = "\0".join((kernel.digest, *OPTIONS, f"{version[0]}.{version[1]}", architecture_name(architecture)))
    path = cache_directory() / f"{hashlib.sha256(described.encode()).hexdigest()}.cubin"
    code = _read_verified(path)
    if code is None:
        code = compile_kernel(kernel.text, kernel.entry, architecture)
        write_entry(path, hashlib.sha256(code).digest() + code)
    return code


def _read_verified(path: Path) -> bytes | None:
    """The content of an entry; one that is damaged counts as absent."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_entry(path: Path, content: bytes) -> None:
    """Writes an entry under a temporary name and renames it. A cache that cannot be written is done without."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    with suppress(OSError):
        temporary.unlink()
