"""The tensors of a checkpoint by name, as numpy arrays; each is read when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array

__all__ = ["SafetensorsFolder", "Tensors"]


class Tensors(ABC):
    """Tensors by name; it remembers which were taken.

    Attributes:
        metadata: What the files say beside their tensors, as texts by name.
    """

    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Of all tensors."""

    @abstractmethod
    def _read(self, name: str) -> Array:
        """A tensor that is there."""

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    def take(self, name: str, shape: Sequence[int | None] | None = None, kinds: Sequence[str] = ()) -> Array:
        """A tensor.

        Args:
            name: Its name.
            shape: The shape that it must have, None for any size; None for any shape.
            kinds: Names of the data types that it may have; none for any.

        Raises:
            ExtractionError: It is missing, or of another shape or type.
        """
        if name not in self:
            raise ExtractionError(
                f"'{name}' is missing from the checkpoint, expected it by its configuration; download it again"
            )
        array = self._read(name)
        self._taken.add(name)
        if shape is not None:
            fits = len(shape) == array.ndim and all(
                n in (None, own) for n, own in zip(shape, array.shape, strict=False)
            )
            if not fits:
                expected = ", ".join("any" if n is None else str(n) for n in shape)
                raise ExtractionError(f"'{name}': given the shape {list(array.shape)}, expected [{expected}]")
        if kinds and array.dtype.name not in kinds:
            raise ExtractionError(f"'{name}': given {array.dtype.name}, expected {' or '.join(kinds)}")
        return array

    def take_if_there(
        self, name: str, shape: Sequence[int | None] | None = None, kinds: Sequence[str] = ()
    ) -> Array | None:
        """As `take`; None where there is no such tensor."""
        return self.take(name, shape, kinds) if name in self else None

    def skip(self, *names: str) -> None:
        """Marks tensors as taken that are not needed."""
        self._taken.update(names)

    def left(self) -> list[str]:
        """Names of the tensors that nobody took, sorted."""
        return sorted(set(self.names()) - self._taken)


class SafetensorsFolder(Tensors):
    """All ``.safetensors`` files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers.

        Raises:
            ExtractionError: There are none, or one is damaged.
        """
        super().__init__()
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ExtractionError(
                f"given '{folder}' without .safetensors files, expected the weights of the model there"
            )
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ExtractionError(f"'{path}' is no whole safetensors file ({error}); download it again") from error
            metadata |= file.metadata() or {}
            self._files.update(dict.fromkeys(file.keys(), file))
        self.metadata = metadata

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def _read(self, name: str) -> Array:
        tensor = self._files[name].get_tensor(name)
        kind = str(tensor.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, kind):
            import torch

            bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
            array: Array = tensor.contiguous().view(bits).numpy().view(getattr(ml_dtypes, kind))
            return array
        return np.asarray(tensor.numpy())
