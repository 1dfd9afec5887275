"""What kernels leave where an index lies beyond its tensor, read once the device has been waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_compiler.artifact.plan import ExecutionPlan, Role
from npu_compiler.errors import DeviceError, InputError, NPUError
from npu_runtime.backend import Backend, DeviceBuffer

__all__ = ["FaultRecord", "Runs"]


@dataclass
class Runs:
    """Runs between two looks at the record, and why their outputs are nothing that anybody should see."""

    error: NPUError | None = None

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error


class FaultRecord:
    """The record of faults of one plan's kernels, in memory that the device writes and the host reads where it lies.

    Attributes:
        memory: The plan's buffer of `Role.FAULTS`; None where its kernels check no index.
        runs: Those that were asked for since the host looked.
    """

    def __init__(self, plan: ExecutionPlan, backend: Backend) -> None:
        """Allocates the record; raises OutOfMemoryError where there is no memory for it."""
        self._plan = plan
        self.runs = Runs()
        self.memory: DeviceBuffer | None = None
        nbytes = next((buffer.nbytes for buffer in plan.buffers if buffer.role is Role.FAULTS), None)
        if nbytes is not None:
            self.memory = backend.allocate_visible(nbytes)
            self._clear()
            self._words = self.memory.reading().view(np.int32)

    def look(self, *, finished: bool = True) -> None:
        """Looks at the record, and raises for a fault that is there.

        Args:
            finished: Whether everything that was asked for has run; later runs may still add to the record otherwise.

        Raises:
            InputError: An index lay beyond its tensor in one of the `runs`.
            DeviceError: The record is no fault that the program knows.
        """
        if self.memory is None:
            return
        runs = self.runs
        check = int(self._words[0])
        if check > 0:
            runs.error = self._error(check - 1)
            self._clear()
        if check > 0 or finished:
            self.runs = Runs()
        runs.check()

    def _error(self, check: int) -> NPUError:
        element, value = int(self._words[1]), int(self._words[2:4].view(np.int64)[0])
        if check >= len(self._plan.checks):
            return DeviceError(
                f"a kernel reports a fault of the index {check}, the program checks {len(self._plan.checks)}; the file "
                "is damaged, compile the model again"
            )
        inputs = [spec.name for spec in self._plan.inputs]
        return InputError(self._plan.checks[check].refusal(element, value, inputs))

    def _clear(self) -> None:
        assert self.memory is not None
        with self.memory.writing() as content:
            content[:] = 0
