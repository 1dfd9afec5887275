"""Outputs whose memory is used again once nobody holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import getrefcount
from typing import NamedTuple

from cuda_runtime.tensor import CUDATensor

__all__ = ["OutputRing", "OutputSet"]

_MOST = 4  # sets; a graph is captured for each


class OutputSet(NamedTuple):
    """Memory for all outputs of a run.

    Attributes:
        key: Tells it from other memory; graphs are kept by it.
        tensors: By the name of the output.
    """

    key: object
    tensors: Mapping[str, CUDATensor]


class OutputRing:
    """A few sets of outputs, made when needed. One that was given out is taken again when no reference to it is left.

    Who shares a tensor's memory, as a view or by DLPack, holds the memory's owner: that is watched, too.
    """

    def __init__(self, make: Callable[[], Mapping[str, CUDATensor]]) -> None:
        self._make = make
        self._members: list[tuple[OutputSet, list[object], list[int]]] = []

    def take(self) -> OutputSet | None:
        """A set that nobody holds; None where there are enough and all are held."""
        for outputs, watched, alone in self._members:
            if _counts(watched) == alone:
                return outputs
        if len(self._members) == _MOST:
            return None
        outputs = OutputSet(len(self._members), self._make())
        watched = [part for each in outputs.tensors.values() for part in (each, each.data, each.data.owner)]
        self._members.append((outputs, watched, []))
        self._members[-1][2].extend(_counts(watched))
        return outputs


def _counts(watched: list[object]) -> list[int]:
    return [getrefcount(part) for part in watched]
