"""What tuning found for a device: for each choice its options' times, in small files that processes share.

A choice is known by what its options launch, not by where in a model they stand. A file that is damaged, or that does
not fit the choice, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from cuda_compiler.artifact.extensions import cluster_of
from cuda_runtime.kernel_cache import cache_directory, write_entry
from npu_compiler.artifact.plan import Call, CallChoice, KernelCall, KernelSource
from npu_runtime.tuning import OptionTimes

__all__ = ["TuningResults", "choice_digest", "tuning_directory"]

_FORMAT = 1


class TuningResults:
    """The results for one kind of device."""

    def __init__(self, device: str, capability: int) -> None:
        """Args:
        device: What the device calls itself.
        capability: Its compute capability times ten.
        """
        self._device, self._capability = device, capability
        self._known: dict[str, OptionTimes | None] = {}

    def times(self, choice: CallChoice, kernels: Sequence[KernelSource]) -> OptionTimes | None:
        """What is known of a choice; `kernels` are those of its plan."""
        digest = choice_digest(choice, kernels)
        if digest not in self._known:
            self._known[digest] = _read(self._path(digest), len(choice.options))
        return self._known[digest]

    def keep(self, digest: str, times: OptionTimes) -> None:
        """Remembers the result for a choice, in memory and, where the cache can be written, in a file."""
        self._known[digest] = times
        content = {
            "format": _FORMAT,
            "device": self._device,
            "capability": self._capability,
            "microseconds": times.microseconds,
            "winner": times.winner,
        }
        write_entry(self._path(digest), json.dumps(content).encode())

    def _path(self, digest: str) -> Path:
        described = f"{self._device}\0{self._capability}\0{digest}"
        return tuning_directory() / f"{hashlib.sha256(described.encode()).hexdigest()}.json"


def tuning_directory() -> Path:
    """Where results are kept."""
    return cache_directory() / "tuning"


def choice_digest(choice: CallChoice, kernels: Sequence[KernelSource]) -> str:
    """SHA-256, in hexadecimal, of what the options launch: kernels, sizes, parameters; no names of tensors."""
    options = [(option.requires, [_work(call, kernels) for call in option.calls]) for option in choice.options]
    return hashlib.sha256(repr(options).encode()).hexdigest()


def _work(call: Call, kernels: Sequence[KernelSource]) -> tuple[object, ...]:
    if isinstance(call, KernelCall):
        shape = (call.grid, call.block, cluster_of(call), call.shared_bytes)
        return kernels[call.kernel].digest, call.params, *shape
    return call.routine, sorted(call.attrs.items())


def _read(path: Path, options: int) -> OptionTimes | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    times, winner = content.get("microseconds"), content.get("winner")
    if not isinstance(times, list) or len(times) != options or type(winner) is not int:
        return None
    numbers = all(time is None or (type(time) is float and time >= 0) for time in times)
    if not numbers or not 0 <= winner < options or times[winner] is None:
        return None
    return OptionTimes(tuple(times), winner)
