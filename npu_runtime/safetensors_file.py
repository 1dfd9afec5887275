"""Reads safetensors files, a tensor at a time.

The format: eight bytes with the length of a JSON header, the header, the data. The header gives each tensor's dtype,
shape and place in the data. It is read here because the
`safetensors` package maps the file, and gives numpy no bfloat16.
"""

from __future__ import annotations

import json
import os
import stat
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler import dtypes
from npu_compiler.errors import WeightError

__all__ = ["SafetensorsFile", "ShardedFiles", "TensorFile", "open_safetensors"]

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_READ = 1 << 30  # of one call; systems take less than 2 GiB
_INDEX = "*.safetensors.index.json"


class TensorFile(Mapping[str, NDArray[Any]]):
    """The tensors of files, by name; each is read when it is asked for, into memory of its own or the caller's.

    Several threads may read at once.
    """

    @abstractmethod
    def describe(self, name: str) -> tuple[dtypes.DType, tuple[int, ...]]:
        """Data type and shape of a tensor.

        Raises:
            WeightError: The file says what cannot be.
        """

    @abstractmethod
    def read_into(self, name: str, memory: NDArray[np.uint8], start: int = 0) -> None:
        """Fills `memory` with the bytes of a tensor from its byte `start` on.

        Raises:
            WeightError: The file cannot be read, was changed, or the tensor has not that many bytes.
        """


def open_safetensors(path: Path) -> TensorFile:
    """Opens a ``.safetensors`` file, or a folder that holds one or an index of several.

    Raises:
        WeightError: Nothing of the kind there, or a file that is damaged.
    """
    if not path.is_dir():
        return SafetensorsFile(path)
    indices, files = sorted(path.glob(_INDEX)), sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return ShardedFiles(indices[0])
    if not indices and len(files) == 1:
        return SafetensorsFile(files[0])
    raise WeightError(
        f"given the folder '{path}' with {len(files)} .safetensors files and {len(indices)} indices, expected one "
        f"file, or one index ({_INDEX}); give the path of a file"
    )


class SafetensorsFile(TensorFile):
    """The tensors of one file.

    The file is not mapped: where somebody truncates a file, a mapping of it ends the process.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path` and reads its header.

        Raises:
            WeightError: It cannot be read, is truncated, or is no safetensors file.
        """
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightError(f"cannot read '{path}': {reason}; give the path of a .safetensors file") from error
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise WeightError(f"'{path}' is no regular file, expected one; give the path of a .safetensors file")
        self._length, self._changed = status.st_size, status.st_mtime_ns
        self._lock = Lock()
        self._entries, self._start = self._read_header()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        if self._length < _LENGTH_BYTES:
            raise self._damaged(f"{self._length} bytes")
        length = int.from_bytes(self._read(0, _LENGTH_BYTES).tobytes(), "little")
        start = _LENGTH_BYTES + length
        if length > _MAX_HEADER or start > self._length:
            raise self._damaged(f"{self._length} bytes with a header of {length}")
        try:
            header = json.loads(self._read(_LENGTH_BYTES, length).tobytes())
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"a header that is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._damaged("a header that is not a JSON object")
        header.pop("__metadata__", None)
        return header, start

    def _read(self, start: int, count: int) -> NDArray[np.uint8]:
        """`count` bytes of the file from `start` on."""
        content = np.empty(count, np.uint8)
        self._fill(content.data, start)
        return content

    def _fill(self, memory: memoryview, start: int) -> None:
        """Reads the file from `start` on until `memory` is full."""
        count, done, error = len(memory), 0, ""
        try:
            while done < count:
                got = self._read_some(memory[done : done + _MAX_READ], start + done)
                if not got:
                    break
                done += got
        except OSError as failure:
            error = f"reading fails: {failure.strerror}"
        if not error and (done < count or os.fstat(self._file).st_mtime_ns != self._changed):
            error = "it was changed while it was read"
        if error:
            raise WeightError(f"'{self.path}': {error}; load the weights again once the file is whole")

    def _read_some(self, memory: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [memory], start)
        with self._lock:  # without positioned reads, as on Windows
            os.lseek(self._file, start, os.SEEK_SET)
            data = os.read(self._file, len(memory))
        memory[: len(data)] = data
        return len(data)

    def _damaged(self, what: str) -> WeightError:
        return WeightError(
            f"'{self.path}' is no whole safetensors file: {what}; give the .safetensors file that was written beside "
            "the IR, or, if this is it, copy or download it again"
        )

    def __getitem__(self, name: str) -> NDArray[Any]:
        kind, shape, begin = self._place(name)
        return self._read(self._start + begin, prod(shape) * kind.size).view(kind.numpy).reshape(shape)

    def describe(self, name: str) -> tuple[dtypes.DType, tuple[int, ...]]:
        return self._place(name)[:2]

    def read_into(self, name: str, memory: NDArray[np.uint8], start: int = 0) -> None:
        kind, shape, begin = self._place(name)
        count = prod(shape) * kind.size
        if not 0 <= start <= count - memory.nbytes:
            raise WeightError(f"'{name}': asked for bytes {start} to {start + memory.nbytes}, it has {count}")
        self._fill(memory.data, self._start + begin + start)

    def _place(self, name: str) -> tuple[dtypes.DType, tuple[int, ...], int]:
        """Dtype, shape and offset into the data of a tensor, checked against the bytes that are there."""
        match self._entries[name]:
            case {"dtype": str(kind_name), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise self._damaged(f"tensor '{name}' has no dtype, shape and data_offsets")
        known = {kind.safetensors: kind for kind in dtypes.ALL}
        kind = known.get(kind_name)
        if kind is None:
            raise WeightError(f"'{self.path}': '{name}' has dtype {kind_name}, expected one of {', '.join(known)}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise self._damaged(f"tensor '{name}' has the shape {shape}")
        if not 0 <= begin <= end <= self._length - self._start or end - begin != prod(shape) * kind.size:
            raise self._damaged(f"tensor '{name}' lies at {begin}:{end} of {self._length - self._start} bytes")
        return kind, tuple(shape), begin

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class ShardedFiles(TensorFile):
    """The tensors of several files that an index lists; each file is opened when first needed."""

    def __init__(self, index: Path) -> None:
        """Reads ``model.safetensors.index.json``.

        Raises:
            WeightError: It is not such an index.
        """
        self._index = index
        self._files: dict[str, SafetensorsFile] = {}
        try:
            content = json.loads(index.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise WeightError(f"cannot read the index '{index}': {error}; download it again") from error
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise WeightError(f"'{index}' has no 'weight_map' from tensor names to file names; download it again")
        self._names: dict[str, str] = names

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._file_of(name)[name]

    def describe(self, name: str) -> tuple[dtypes.DType, tuple[int, ...]]:
        return self._file_of(name).describe(name)

    def read_into(self, name: str, memory: NDArray[np.uint8], start: int = 0) -> None:
        self._file_of(name).read_into(name, memory, start)

    def _file_of(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        file_name = self._names[name]
        if Path(file_name).name != file_name:
            raise WeightError(f"'{self._index}' places '{name}' in '{file_name}', expected a file beside the index")
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self._index.parent / file_name)
        file = self._files[file_name]
        if name not in file:
            raise WeightError(f"'{self._index}' places '{name}' in '{file_name}', which does not hold it")
        return file

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
