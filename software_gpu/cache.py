"""A directory of compiled libraries, shared by processes.

An entry is an object file, or a shared object, followed by what the host must know about it (JSON) and a digest of
both. It is written to a temporary name and renamed; one that does not verify counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from npu_compiler.errors import ToolchainError

__all__ = ["cache_directory", "drop_entries", "kept_descriptions", "load_or_build"]

_TRAILER = struct.Struct("<Q32s")
_ABANDONED_AFTER = 3600.0  # seconds; no compilation takes as long


def cache_directory() -> Path:
    """Where compiled kernels are kept: NPU_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("NPU_CACHE_DIR")
    if chosen:
        return Path(chosen, "software_gpu")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "npu-compiler", "software_gpu")


def load_or_build(key: str, build: Callable[[Path], bytes]) -> tuple[Path, bytes]:
    """The compiled code of `key` and its description, built when absent.

    Args:
        key: Digest of everything that decides the content.
        build: Writes the code to the path it is given and returns the description.
    """
    path = cache_directory() / f"{key}.so"
    description = _read_verified(path)
    if description is not None:
        return path, description
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{key}.")
    except OSError as error:
        raise ToolchainError(
            f"the kernel cache {path.parent} can't be written: {error}. Name another directory in NPU_CACHE_DIR"
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        description = build(temporary)
        try:
            with temporary.open("ab") as file:
                file.write(description)
                file.write(_TRAILER.pack(len(description), _digest(temporary.read_bytes(), description)))
            temporary.chmod(0o755)
            temporary.replace(path)
        except OSError as error:
            raise ToolchainError(
                f"a compiled kernel can't be kept in {path.parent}: {error}. Free some space, or name another "
                "directory in NPU_CACHE_DIR"
            ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return path, description


def kept_descriptions() -> Iterator[bytes]:
    """The descriptions of all entries, not verified."""
    for path in _files("*.so"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TRAILER.size))
            trailer = file.read()
            if len(trailer) == _TRAILER.size and (length := _TRAILER.unpack(trailer)[0]) <= size - _TRAILER.size:
                file.seek(size - _TRAILER.size - length)
                yield file.read(length)


def drop_entries(unwanted: Callable[[bytes], bool]) -> int:
    """Deletes what is damaged or left over by a process that was killed, and entries whose description is unwanted.

    Returns:
        How many files are gone.

    Raises:
        ToolchainError: One can't be deleted.
    """
    dropped = 0
    try:
        for path in _files("*"):
            if path.suffix == ".so":
                description = _read_verified(path)
                keep = description is not None and not unwanted(description)
            else:
                keep = time.time() - path.stat().st_mtime < _ABANDONED_AFTER  # another process may be writing it
            if not keep:
                path.unlink(missing_ok=True)
                dropped += 1
    except OSError as error:
        raise ToolchainError(f"the kernel cache {cache_directory()} can't be repaired: {error}") from error
    return dropped


def _files(pattern: str) -> list[Path]:
    folder = cache_directory()
    return sorted(path for path in folder.glob(pattern) if path.is_file()) if folder.is_dir() else []


def _digest(code: bytes, description: bytes) -> bytes:
    return hashlib.sha256(code + description).digest()


def _read_verified(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _TRAILER.size:
        return None
    length, digest = _TRAILER.unpack(content[-_TRAILER.size :])
    end = len(content) - _TRAILER.size
    if length > end:
        return None
    code, description = content[: end - length], content[end - length : end]
    return description if _digest(code, description) == digest else None
