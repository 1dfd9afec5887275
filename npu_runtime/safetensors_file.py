"""Reads safetensors files without copying: numpy arrays that lie in the mapped file.

The format: eight bytes with the length of a JSON header, the header, the data. The header gives each tensor's dtype,
shape and place in the data. It is read here because the `safetensors` package gives numpy copies.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler import dtypes
from npu_compiler.errors import WeightError

__all__ = ["SafetensorsFile", "ShardedFiles", "open_safetensors"]

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # the format's own limit
_BY_NAME = {kind.safetensors: kind for kind in dtypes.ALL}
_INDEX = "*.safetensors.index.json"

Tensors = Mapping[str, NDArray[Any]]


def open_safetensors(path: Path) -> Tensors:
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


class SafetensorsFile(Mapping[str, NDArray[Any]]):
    """The tensors of one file, read-only. The file stays mapped as long as an array of it lives."""

    def __init__(self, path: Path) -> None:
        """Maps `path` and reads its header.

        Raises:
            WeightError: It cannot be read, is truncated, or is no safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                length = path.stat().st_size
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if length else b""
        except OSError as error:
            raise WeightError(
                f"cannot read '{path}': {error.strerror}; give the path of a .safetensors file"
            ) from error
        self._entries, self._start = self._read_header()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._data[:_LENGTH_BYTES], "little")
        start = _LENGTH_BYTES + length
        if len(self._data) < _LENGTH_BYTES or length > _MAX_HEADER or start > len(self._data):
            raise self._damaged(f"{len(self._data)} bytes with a header of {length}")
        try:
            header = json.loads(self._data[_LENGTH_BYTES:start])
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"a header that is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._damaged("a header that is not a JSON object")
        header.pop("__metadata__", None)
        return header, start

    def _damaged(self, what: str) -> WeightError:
        return WeightError(f"'{self.path}' is no whole safetensors file: {what}; copy or download it again")

    def __getitem__(self, name: str) -> NDArray[Any]:
        kind, shape, begin = self._place(name, self._entries[name])
        flat = np.frombuffer(self._data, kind.numpy, prod(shape), self._start + begin) if prod(shape) else None
        return np.zeros(shape, kind.numpy) if flat is None else flat.reshape(shape)

    def _place(self, name: str, entry: object) -> tuple[dtypes.DType, tuple[int, ...], int]:
        """Dtype, shape and offset into the data of a tensor, checked against the bytes that are there."""
        match entry:
            case {"dtype": str(kind_name), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise self._damaged(f"tensor '{name}' has no dtype, shape and data_offsets")
        kind = _BY_NAME.get(kind_name)
        if kind is None:
            raise WeightError(f"'{self.path}': '{name}' has dtype {kind_name}, expected one of {', '.join(_BY_NAME)}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise self._damaged(f"tensor '{name}' has the shape {shape}")
        if not 0 <= begin <= end <= len(self._data) - self._start or end - begin != prod(shape) * kind.size:
            raise self._damaged(f"tensor '{name}' lies at {begin}:{end} of {len(self._data) - self._start} bytes")
        return kind, tuple(shape), begin

    def release(self) -> None:
        """Gives back the memory that what was read so far takes; arrays stay valid, and are read anew where needed."""
        if isinstance(self._data, mmap.mmap):
            self._data.madvise(mmap.MADV_DONTNEED)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class ShardedFiles(Mapping[str, NDArray[Any]]):
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
        file_name = self._names[name]
        if Path(file_name).name != file_name:
            raise WeightError(f"'{self._index}' places '{name}' in '{file_name}', expected a file beside the index")
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self._index.parent / file_name)
        try:
            return self._files[file_name][name]
        except KeyError:
            raise WeightError(f"'{self._index}' places '{name}' in '{file_name}', which does not hold it") from None

    def release(self) -> None:
        """As `SafetensorsFile.release`, of all files."""
        for file in list(self._files.values()):  # a thread may open one more meanwhile
            file.release()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
