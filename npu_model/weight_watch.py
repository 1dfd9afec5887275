"""Notices that tensors which a program has loaded as its weights are no longer what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_runtime.host_tensors import Array, to_numpy

__all__ = ["WeightWatch"]

_SAMPLES = 64  # values of a tensor


class WeightWatch:
    """Tensors as they were. While it is held, no other tensor takes their addresses.

    A change is seen by PyTorch's own count of what is written, and by the address. What is not counted (writing through
    ``.data`` or numpy) is seen in the host's memory by some values of each tensor, spread over it; on a GPU looking
    would mean waiting.
    """

    _uncounted = 0

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self._state = self._read(tensors)
        self._samples = [sample for tensor in self.tensors if (sample := _sample(tensor)) is not None]
        self._values = self._sampled()

    @classmethod
    def distrust(cls) -> None:
        """Says that a tensor may have been written which nothing counts; every weight then counts as changed once."""
        cls._uncounted += 1

    def changed(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors are others, or hold other values."""
        return self._read(tensors) != self._state or self._sampled() != self._values

    @classmethod
    def _read(cls, tensors: Sequence[torch.Tensor]) -> list[int]:
        state = [cls._uncounted]
        for tensor in tensors:
            state += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        return state

    def _sampled(self) -> list[bytes]:
        return [sample.tobytes() for sample in self._samples]


def _sample(tensor: torch.Tensor) -> Array | None:
    """Some values of a tensor of the host, in its own memory; None where they are not to be had."""
    count = tensor.numel()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.device.type != "cpu" or count == 0 or span != count or tensor.is_conj() or tensor.is_neg():
        return None
    return to_numpy(tensor.as_strided((min(count, _SAMPLES),), (max(1, count // _SAMPLES),)))
