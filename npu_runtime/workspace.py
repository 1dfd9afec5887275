"""Memory for intermediate tensors that several executors use in turns."""

from __future__ import annotations

from threading import Lock

from npu_compiler.artifact.plan import ExecutionPlan, Role
from npu_runtime.backend import Backend, DeviceBuffer

__all__ = ["Workspace"]


class Workspace:
    """Arenas as large as the largest plan needs that was announced.

    Attributes:
        lock: Held by whoever runs in this memory.
        version: Another number whenever an arena is in another place.
    """

    def __init__(self, backend: Backend) -> None:
        self.lock = Lock()
        self.version = 0
        self._backend = backend
        self._arenas: list[DeviceBuffer] = []

    def announce(self, plan: ExecutionPlan) -> None:
        """Makes room for a plan; where that takes new memory, executors find it at their next run.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        for number, index in enumerate(_arena_indices(plan)):
            self._grow(number, plan.buffers[index].nbytes)

    def arenas(self, plan: ExecutionPlan) -> dict[int, DeviceBuffer]:
        """The memory of a plan's arenas, by the index of the buffer."""
        return {index: self._arenas[number] for number, index in enumerate(_arena_indices(plan))}

    def _grow(self, number: int, nbytes: int) -> None:
        with self.lock:
            if number == len(self._arenas):
                self._arenas.append(self._backend.allocate(nbytes))
            elif self._arenas[number].nbytes < nbytes:
                self._arenas[number] = self._backend.allocate(nbytes)
            else:
                return
            self.version += 1


def _arena_indices(plan: ExecutionPlan) -> list[int]:
    return [index for index, buffer in enumerate(plan.buffers) if buffer.role is Role.ARENA]
