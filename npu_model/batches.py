"""Rows of any number through a model of a fixed batch: an actor for `ray.data.Dataset.map_batches`, or by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_compiler.ir import TensorSpec
from npu_model.model import load
from npu_runtime.device import Device

__all__ = ["ModelBatches"]

_Array = NDArray[Any]


class ModelBatches:
    """Runs a model on the rows of batches.

    The first dimension of each of the model's inputs and outputs is its own batch, which is fixed. Rows are cut into so
    many; the last part is filled up with its last row, and what comes of that is dropped.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        weights: str | os.PathLike[str] | None = None,
        device: str | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        into: Sequence[str] | None = None,
    ) -> None:
        """Opens the model; where the actor runs.

        Args:
            model, weights: As `npu_model.load`, by paths that every machine has.
            device: Where to run, by name; the best device of the machine when omitted.
            columns: The column of each input, by the input's name; where none is given, the one of that name.
            into: The columns of the outputs, in order; the outputs' own names when omitted.

        Raises:
            InputError: The inputs and outputs have not all one batch, or the names are none of theirs.
            NPUError: As `load`.
        """
        self._model = load(model, weights, Device.of(device) if device else None)
        inputs, outputs = self._model.inputs, self._model.outputs
        sizes = {spec.shape[0] if spec.shape else 0 for spec in (*inputs, *outputs)}
        self._batch = next(iter(sizes))
        if len(sizes) > 1 or not self._batch:
            raise InputError(f"{self._model!r} takes no batch: its inputs and outputs begin with {sorted(sizes)}")
        wrong = sorted((columns or {}).keys() - {spec.name for spec in inputs})
        if wrong:
            raise InputError(f"given a column for '{wrong[0]}', expected {', '.join(spec.name for spec in inputs)}")
        self._columns = {spec.name: (columns or {}).get(spec.name, spec.name) for spec in inputs}
        self._into = [spec.name for spec in outputs] if into is None else list(into)
        if len(self._into) != len(outputs):
            raise InputError(f"given {len(self._into)} columns for {len(outputs)} outputs")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the model on rows.

        Args:
            batch: Columns of equal length; those of the inputs have rows of the inputs' shapes, without their batch.

        Returns:
            The outputs, row by row, beside the columns that are not inputs; bfloat16 as float32.

        Raises:
            InputError: A column is missing, or its rows have another shape or dtype.
            DeviceError: The device failed.
        """
        missing = next((column for column in self._columns.values() if column not in batch), None)
        if missing is not None:
            raise InputError(f"the batch has no column '{missing}', it has {', '.join(batch)}")
        inputs = {name: _stacked(batch[column]) for name, column in self._columns.items()}
        count = len(next(iter(inputs.values())))
        parts = [self._run(inputs, start, min(self._batch, count - start)) for start in range(0, count, self._batch)]
        results = {
            column: np.concatenate([part[number] for part in parts]) if parts else _nothing(spec)
            for number, (column, spec) in enumerate(zip(self._into, self._model.outputs, strict=True))
        }
        kept = {name: values for name, values in batch.items() if name not in self._columns.values()}
        return {**kept, **results}

    def _run(self, inputs: Mapping[str, _Array], start: int, count: int) -> list[_Array]:
        rows = np.minimum(np.arange(start, start + self._batch), start + count - 1)
        result = self._model({name: values[rows] for name, values in inputs.items()})
        return [_storable(np.asarray(tensor))[:count] for tensor in _tensors(result)]


def _stacked(column: Any) -> _Array:
    """Rows as one array; columns of tensors may come as arrays of arrays."""
    values = np.asarray(column)
    return np.stack(list(values)) if values.dtype == object and len(values) else values


def _tensors(result: Any) -> Iterator[Any]:
    """What a model gave, in the order of its outputs."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple):
        for each in result:
            yield from _tensors(each)
    else:
        yield result


def _storable(values: _Array) -> _Array:
    """Values as a column takes them, which knows numpy's own data types."""
    return values if values.dtype.kind in "biuf" else values.astype(np.float32)


def _nothing(spec: TensorSpec) -> _Array:
    return _storable(np.zeros((0, *spec.shape[1:]), spec.dtype.numpy))
