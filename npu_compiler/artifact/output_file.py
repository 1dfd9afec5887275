"""Writing files: whole or not at all, and never over what is being read."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from npu_compiler.errors import InputError, NPUError

__all__ = ["check_output", "replacing", "same_file", "write_file"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_output(
    path: Path, inputs: Iterable[str | os.PathLike[str]] = (), failure: type[NPUError] = InputError
) -> None:
    """Refuses a path that must not be written to, before any work is done for it.

    Args:
        path: What is to be written; where it is a symbolic link, what that leads to.
        inputs: Files that the caller reads. None of them may be the same file as `path`, under whatever name.
        failure: Class of the error.

    Raises:
        NPUError: `path` is one of `inputs`, something other than a regular file (a folder, a pipe, a device), or in a
            folder that does not exist. Of the class `failure`.
    """
    target = _target(path, failure)
    for source in inputs:
        if same_file(target, Path(source)):
            raise failure(f"cannot write '{path}': it is the input '{source}' of this very step; choose another path")


def write_file(
    path: Path, data: bytes, inputs: Iterable[str | os.PathLike[str]] = (), failure: type[NPUError] = InputError
) -> None:
    """Writes `data` as the whole content of `path`; arguments and errors are those of `replacing`."""
    with replacing(path, inputs, failure) as file:
        file.write(data)


@contextmanager
def replacing(
    path: Path, inputs: Iterable[str | os.PathLike[str]] = (), failure: type[NPUError] = InputError
) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all is written, and is removed when something fails.

    A symbolic link is followed: what it leads to is replaced. A file that exists keeps its mode.

    Args:
        path, inputs, failure: As for `check_output`.

    Raises:
        NPUError: As `check_output`; or the folder cannot be written, or the disk is full.
    """
    check_output(path, inputs, failure)
    target = _target(path, failure)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except OSError as error:
        # numpy raises OSErrors without a number
        raise failure(f"cannot write '{path}': {error.strerror or error}; choose another place to write to") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _target(path: Path, failure: type[NPUError]) -> Path:
    """The regular file that `path` leads to, or may become."""
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if os.path.lexists(target) else stat.S_IFREG
        os.stat(f"{target.parent}/")  # the slash: it has to be a folder
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise failure(f"cannot write '{path}': {reason}; choose a folder that exists") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise failure(f"cannot write '{path}': it is {kind}, expected a regular file; choose another path")
    return target


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file, through links of either kind; or would, once it exists."""
    try:
        return a.samefile(b)
    except OSError:  # one of them does not exist
        return os.path.realpath(a) == os.path.realpath(b)
