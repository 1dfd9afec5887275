"""`Executor` with what CUDA adds: tensors of other libraries as inputs, streams, and runs that are not waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from cuda_runtime.backend import CUDABackend
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import CUDATensor
from cuda_runtime.tuning import Tuner, Tuning
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, TargetMismatchError
from npu_compiler.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor, choose_function
from npu_runtime.weight_loader import Weights

__all__ = ["CUDAExecutor"]


class CUDAExecutor(Executor):
    """One function of a program, ready to run on one CUDA device."""

    _prepared: CUDAPlan

    def __init__(
        self, program: CompiledProgram, device: Device, function: str | None = None, *, tune: bool = False
    ) -> None:
        """Does as `Executor`'s.

        Args:
            program: The program.
            device: A CUDA device.
            function: Which of the program's functions; ``main``, or the only one, when omitted.
            tune: Whether the first run is preceded by `tune` on its inputs.

        Raises:
            TargetMismatchError: The device is no CUDA device, or the program was compiled for another target.
            NPUError: As `Executor`'s.
        """
        if not isinstance(device.backend, CUDABackend):
            raise TargetMismatchError(f"given {device!r}, expected a CUDA device: Device('cuda')")
        super().__init__(program, device, function)
        self._cuda = device.backend
        self._choices = choose_function(program, function)
        self._tunes = tune

    def run(  # type: ignore[override]  # inputs may be more than NPUBuffer
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None = None,
        *,
        sync: bool = True,
        stream: Any = None,
    ) -> dict[str, CUDATensor]:
        """Runs once.

        Args:
            inputs: For each input by name an `NPUBuffer`, or a tensor of CuPy, torch or another library on this device.
            weights: What `load_weights` gave for this program.
            sync: Whether to wait for the result. Else the outputs are still being made when this returns; copying one
                to the host waits for it, and so does whoever takes it by DLPack. An index beyond its tensor is then
                reported by the next call that waits: a run, or `CUDATensor.to_numpy` of an output.
            stream: A stream of CuPy or torch, or its handle: inputs made on it are waited for, and what is asked of it
                later waits for the outputs; the host does not.

        Returns:
            The outputs by name, each in memory of its own that no later run touches.

        Raises:
            InputError: An input is missing or not expected, or has another shape, dtype or device; or another run
                updates it in place; or an index lies beyond the dimension that it is for, as in `Executor.run`, in this
                run or one before that was not waited for.
            WeightError: The weights are those of another program or device.
            DeviceError: The device failed, or another thread is inside of this executor.
        """
        if stream is not None:
            self._order(_handle(stream), self.stream)
        if self._tunes:
            self.tune(inputs, weights)
        with self._running(inputs, weights) as (buffers, outputs):
            self._prepared.launch(buffers)
            if stream is not None:
                self._order(self.stream, _handle(stream))
            elif sync:
                self._prepared.wait()
                self._faults.look()
        return {name: output for name, output in outputs.items() if isinstance(output, CUDATensor)}

    def tune(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> Tuning:
        """Times what the compiler left to choose, keeps the winners for this kind of device, and takes them.

        Args:
            inputs: As for `run`; what the program updates in place is left as it was.
            weights: As for `run`.

        Raises:
            NPUError: As `run` does.
        """
        with self._running(inputs, weights) as (buffers, _):
            tuning = Tuner(self._choices, self._cuda, buffers).tune()
            self.plan = self._choices.resolved(self._cuda.select)
            self._prepared = self._cuda.prepare(self.plan)
            self._tunes = False
            self._faults.look()
        return tuning

    @contextmanager
    def _running(
        self, inputs: Mapping[str, Any], weights: Weights | None
    ) -> Iterator[tuple[list[CUDABuffer], dict[str, NPUBuffer]]]:
        """The executor and what it updates, for this thread alone: the memory of the plan's buffers, and the outputs.

        Raises:
            NPUError: As `run` does.
        """
        adopted = {name: self._adopted(name, value) for name, value in inputs.items()}
        if not self._lock.acquire(blocking=False):
            raise DeviceError("another thread is running this executor; give each thread an executor of its own")
        try:
            buffers, outputs = self._bind(adopted, weights)
            with self._updating(adopted):
                yield cast("list[CUDABuffer]", buffers), outputs
        finally:
            self._lock.release()

    @property
    def stream(self) -> int:
        """Handle of the stream that everything runs on."""
        return int(self._cuda.stream.ptr)

    def replay(self) -> None:
        """Runs once more on the inputs of the last run, without waiting and without giving outputs.

        Raises:
            InputError: Nothing was run yet.
        """
        self._prepared.replay()

    def _adopted(self, name: str, value: Any) -> NPUBuffer:
        spec = next((spec for spec in self.plan.inputs if spec.name == name), None)
        if spec is None or isinstance(value, NPUBuffer):
            return value  # type: ignore[no-any-return]  # checked, with every other input, when bound
        if not (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
            return value  # type: ignore[no-any-return]
        return CUDATensor.adopt(value, self.device, spec)

    def _output(self, spec: BufferSpec, inputs: Mapping[str, NPUBuffer]) -> NPUBuffer:
        output = super()._output(spec, inputs)
        result = CUDATensor(output.device, output.data, spec)
        result.watch(self._faults)
        return result

    def _order(self, first: int, then: int) -> None:
        """Makes what is asked of the stream `then` from now on wait for what was asked of the stream `first`."""
        runtime = cupy().cuda.runtime
        with self._cuda.active():
            event = cupy().cuda.Event(disable_timing=True)
            runtime.eventRecord(event.ptr, first)
            runtime.streamWaitEvent(then, event.ptr)


def _handle(stream: Any) -> int:
    handle = stream if isinstance(stream, int) else getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    if not isinstance(handle, int):
        raise DeviceError(f"given a {type(stream).__name__} as stream, expected one of CuPy or torch, or its handle")
    return handle
