"""Arrays of files: `.npy`, and images for what takes images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_cli.images import load_image, preprocess
from npu_compiler.artifact.output_file import replacing
from npu_compiler.errors import InputError
from npu_compiler.ir import TensorSpec

__all__ = ["read_arrays", "write_array"]


def read_arrays(files: Mapping[str, Path], specs: Iterable[TensorSpec]) -> dict[str, NDArray[Any]]:
    """The array of each tensor, from its file.

    Raises:
        InputError: A file cannot be read, or is an image for something that takes none.
    """
    return {spec.name: _read(files[spec.name], spec) for spec in specs}


def _read(path: Path, spec: TensorSpec) -> NDArray[Any]:
    if path.suffix == ".npy":
        try:
            array: NDArray[Any] = np.load(path, allow_pickle=False)
        except OSError as error:
            raise InputError(f"cannot read '{path}': {error.strerror}; give the path of an .npy file") from error
        except (ValueError, EOFError) as error:
            raise InputError(f"cannot read '{path}' as a numpy array ({error}); np.save makes one") from error
        return array
    if path.suffix == ".npz":
        raise InputError(f"given '{path}', which holds arrays by name, expected one array; np.save('NAME.npy', array)")
    if len(spec.shape) != 4 or spec.shape[:2] != (1, 3) or not spec.dtype.is_float:
        raise InputError(
            f"'{spec.name}' has shape {spec.shape} and dtype {spec.dtype}, and an image gives float32 of shape "
            f"(1, 3, height, width); give an .npy file instead of '{path}'"
        )
    return preprocess(load_image(path), *spec.shape[2:])


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Writes an `.npy` file, whole or not at all.

    `numpy.save` hands a file's descriptor to C, which does not notice that the last bytes found no room.

    Raises:
        InputError: As `replacing`.
    """
    dense = np.ascontiguousarray(array).reshape(array.shape)
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(dense))
        file.write(dense.reshape(-1).view(np.uint8).data)
