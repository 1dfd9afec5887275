"""Files are written whole or not at all, never over what is being read, and only over regular files."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from npu_cli.arrays import write_array
from npu_compiler.artifact.output_file import check_output, replacing, write_file
from npu_compiler.errors import InputError, ProgramFormatError


@contextmanager
def full_disk() -> Iterator[None]:
    """Files may have 64 bytes; more fails as on a full disk, at the same calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):  # the target is made, then replaced
        write_file(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    path.chmod(0o640)
    write_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_input_is_not_written_over_by_any_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"precious")
    (tmp_path / "symbolic").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    for name in ("source", "symbolic", "hard", "../" + tmp_path.name + "/source"):
        with pytest.raises(InputError, match="it is the input"):
            write_file(tmp_path / name, b"new", [source])
    assert source.read_bytes() == b"precious"


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, kind in (("pipe", "a pipe"), ("link", "a device"), (".", "a folder"), ("circle", "cannot write")):
        with pytest.raises(ProgramFormatError, match=kind):
            write_file(tmp_path / name, b"new", failure=ProgramFormatError)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["missing/file", "zero\0byte"])
def test_paths_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        check_output(tmp_path / name)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(InputError, match="cannot write"):
        write_file(path, b"x" * 100)
    with full_disk(), pytest.raises(InputError, match="cannot write"):
        write_array(path, np.zeros(8))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_error_inside_leaves_what_was_there(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("array", [np.float32(3), np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array([True])])
def test_arrays_are_read_back(array: np.ndarray, tmp_path: Path) -> None:
    write_array(tmp_path / "x.npy", np.asarray(array))
    read = np.load(tmp_path / "x.npy")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
