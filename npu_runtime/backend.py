"""What a device must offer. A new target subclasses these three classes; nothing else in the runtime changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelSource
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import DType
from npu_compiler.dtypes import dtype as find_dtype
from npu_compiler.errors import DeviceError, InputError, IRError
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["Backend", "BoundPlan", "DeviceBuffer", "Launched", "PreparedPlan", "Recording", "Traffic", "Transfers"]


class DeviceBuffer(ABC):
    """A piece of device memory of `nbytes` bytes.

    Attributes:
        part_bytes: How much of it `writing_part` takes at once without a copy; 0 where it can only be written whole.
    """

    nbytes: int
    part_bytes: ClassVar[int] = 0

    @classmethod
    def from_numpy(
        cls, array: Any, backend: Backend, spec: BufferSpec | None = None, dtype: str | DType | None = None
    ) -> DeviceBuffer:
        """The memory of `NPUBuffer.from_numpy`, which takes the same and also knows what lies in it."""
        return backend.allocate_buffer(array, dtype, spec).data  # type: ignore[no-any-return]

    def to_numpy(self, spec: BufferSpec | None = None, dtype: str | DType | None = None) -> NDArray[Any]:
        """The content as a new array on the host.

        Args:
            spec: How the tensor in it lies there, such as ``program.output_specs[0]``; when omitted, the memory is read
                as a flat array.
            dtype: Data type of the array; `spec.host_dtype`, or uint8 without a `spec`, when omitted.

        Raises:
            InputError: The memory is smaller than `spec` says, or no whole number of elements, or of no such dtype.
        """
        try:
            kind = None if dtype is None else find_dtype(dtype)
        except IRError as error:
            raise InputError(f"no array of this kind: {error}") from None
        size = spec.nbytes if spec is not None else self.nbytes
        if size > self.nbytes or (spec is None and kind is not None and size % kind.size):
            wanted = f"'{spec.name}' in {size} bytes" if spec is not None else f"elements of {kind}"
            raise InputError(f"the buffer has {self.nbytes} bytes, expected {wanted}; give the spec of what it holds")
        content = self.reading()
        if spec is None:
            return content[:size].copy().view("uint8" if kind is None else kind.numpy)
        return (spec if kind is None else replace(spec, host_dtype=kind)).decode(content[:size])

    @abstractmethod
    def writing(self) -> AbstractContextManager[NDArray[np.uint8]]:
        """Host memory of `nbytes` bytes that is the buffer's content once the block ends.

        On a device that shares memory with the host it is the buffer itself; its old content is not promised.
        """

    def writing_part(self, start: int, nbytes: int) -> AbstractContextManager[NDArray[np.uint8]]:
        """As `writing`, for `nbytes` bytes from `start` on alone; several threads may write parts at once."""
        raise NotImplementedError(f"{type(self).__name__} has no part_bytes")

    @abstractmethod
    def reading(self) -> NDArray[np.uint8]:
        """The content in host memory, read-only; on a device with shared memory it changes as the buffer does."""

    def overlaps(self, other: DeviceBuffer) -> bool:
        """Whether writing to one may change the other."""
        return self is other


class PreparedPlan(ABC):
    """An execution plan that only waits for its buffers: kernels are compiled, bindings resolved."""

    @abstractmethod
    def run(self, buffers: Sequence[DeviceBuffer]) -> None:
        """Executes all steps and waits for them.

        Args:
            buffers: The memory of each of `ExecutionPlan.buffers`, in that order.

        Raises:
            DeviceError: The device refused a command or failed.
        """

    @abstractmethod
    def run_timed(self, buffers: Sequence[DeviceBuffer]) -> list[float]:
        """Executes as `run` does, one step at a time; gives the seconds that each step took on the device."""


@dataclass(eq=False)
class BoundPlan:
    """A prepared plan with the memory that it works on. Calling it runs it once more on that memory.

    Attributes:
        plan: The plan.
        buffers: The memory of each of its buffers.
        lock: Held while it runs, because others share some of that memory.
        look: `FaultRecord.look` of the plan, for when it has been waited for.
        record: `Backend.record` of the device.
    """

    plan: PreparedPlan
    buffers: Sequence[DeviceBuffer]
    lock: AbstractContextManager[Any]
    look: Callable[..., None]
    record: Callable[[Sequence[BoundPlan]], Recording]

    def __call__(self, *, sync: bool = True, stream: Any = None) -> None:
        """Runs the plan once more; nothing is checked or looked up but the indices that its kernels check.

        Args:
            sync: Whether to wait for it. Else, on a device that runs ahead of the host, the next call that waits
                reports an index beyond its tensor.
            stream: A stream of another library on a device that has streams: what was asked of it before is waited for
                by this run, what is asked of it later waits for this run, and the host waits for neither.

        Raises:
            InputError: An index lies beyond the dimension that it is for.
            DeviceError: The device failed, or has no streams.
        """
        self._recording.replay(sync=sync, stream=stream)

    def run(self) -> None:
        """Runs the plan once and waits for it; raises InputError where an index lay beyond its tensor."""
        with self.lock:
            self.plan.run(self.buffers)
            self.look()

    @cached_property
    def _recording(self) -> Recording:
        return self.record([replace(self)])  # of one that does not hold the recording in turn


class Launched:
    """What was launched: called, it waits until all of that has run. Here it has run already."""

    def __call__(self) -> None:
        """Waits.

        Raises:
            DeviceError: The device failed.
            InputError: An index lay beyond its tensor.
        """

    def is_done(self) -> bool:
        """Whether it has run, so that nothing is left to be waited for; asking takes no time of the device."""
        return True


class Recording:
    """Bound plans that run one after another, again and again. Here each launch runs them and waits for them."""

    def __init__(self, bound: Sequence[BoundPlan]) -> None:
        self._bound = bound

    def launch(self) -> Launched:
        """Asks for all of them, after everything that was asked for before.

        Returns:
            What waits until they have run.

        Raises:
            DeviceError: The device refused a command.
        """
        for bound in self._bound:
            bound.run()
        return Launched()

    def replay(self, *, sync: bool, stream: Any) -> None:
        """Asks for all of them, as `BoundPlan.__call__` says."""
        if stream is not None:
            raise DeviceError(f"given the stream {stream!r:.60}, but this device has no streams; leave it out")
        self.launch()()


@dataclass
class Traffic:
    """Copies in one direction between host and device."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.count, self.nbytes, self.seconds = self.count + 1, self.nbytes + nbytes, self.seconds + seconds

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(self.count - earlier.count, self.nbytes - earlier.nbytes, self.seconds - earlier.seconds)


@dataclass
class Transfers:
    """All copies between host and device that a backend has made."""

    uploads: Traffic = field(default_factory=Traffic)
    downloads: Traffic = field(default_factory=Traffic)


class Backend(ABC):
    """One device, opened.

    Attributes:
        name: What the device calls itself, for people.
        target: The compilation target whose programs it runs.
        transfers: The copies between host and device so far.
        executor_class: Module and name of the class that `executor_type` gives; it is imported only then, because it
            imports this.
        runs_ahead: Whether a recording's launch returns before it has run, so that the host may ask for the next one.
    """

    name: str
    target: str
    transfers: Transfers
    runs_ahead: bool = False
    executor_class: ClassVar[tuple[str, str]] = ("npu_runtime.executor", "Executor")

    @property
    def device(self) -> Any:
        """The `Device` that names it."""
        return import_module("npu_runtime.device").Device(self)

    def create_executor(self, program: CompiledProgram, function: str | None = None, workspace: Any = None) -> Any:
        """An `Executor` of a program on this device, of the kind that makes the most of it.

        Args:
            program, function, workspace: As for `Executor`.

        Raises:
            NPUError: As `Executor` does.
        """
        return self.executor_type()(program, self.device, function, workspace)

    def executor_type(self) -> Any:
        """The class of which `Executor(program, device)` makes an object here."""
        module, name = self.executor_class
        return getattr(import_module(module), name)

    def allocate_buffer(self, source: Any, dtype: str | DType | None = None, spec: BufferSpec | None = None) -> Any:
        """A tensor on this device, as an `NPUBuffer`.

        Args:
            source: An array, whose values it gets; or a shape, for zeros.
            dtype: Data type in device memory; the array's own, or float16 for a shape, when omitted.
            spec: How an array lies there; dense when omitted.

        Raises:
            InputError: As `NPUBuffer.from_numpy` and `NPUBuffer.zeros`.
            OutOfMemoryError: The device has not that much memory.
        """
        kind = import_module("npu_runtime.buffer").NPUBuffer
        if isinstance(source, int | tuple | list):
            return kind.zeros(source, self, dtype=dtype or "float16")
        return kind.from_numpy(source, self, spec, dtype)

    @classmethod
    @abstractmethod
    def open(cls, name: str, ordinal: int) -> Self:
        """Opens the device that `Device(f"{name}:{ordinal}")` names.

        Raises:
            DeviceError: This machine has no such device.
            MissingDependencyError: A package that the device needs is not installed.
        """

    def sibling(self, overlapping: int = 1) -> Backend:
        """The same device for work that may overlap with this one's; itself where a device does one thing at a time.

        Args:
            overlapping: How many do so at once, see `Device.sibling`.
        """
        return self

    def shares_memory_with(self, other: Backend) -> bool:
        """Whether buffers of the other serve here, too."""
        return other is self

    def wait_for(self, other: Backend) -> None:
        """Has what is asked of this one from now on wait for what was asked of a sibling; the host does not."""
        return  # a device that does one thing at a time does all in order

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory whose content is not promised.

        Raises:
            OutOfMemoryError: The device has not that much.
        """

    def select(self, choice: CallChoice, kernels: Sequence[KernelSource]) -> int:
        """Which option of a choice this device takes: the first that requires nothing, where it knows no better.

        Args:
            choice: The choice.
            kernels: The kernels of its plan.

        Raises:
            DeviceError: An option requires what this release does not know.
        """
        return next(index for index, option in enumerate(choice.options) if not option.requires)

    @abstractmethod
    def prepare(self, plan: ExecutionPlan) -> PreparedPlan:
        """Does everything expensive once: compiles kernels, resolves bindings.

        Args:
            plan: A plan without choices (`ExecutionPlan.resolved`).

        Raises:
            KernelCompileError: The device's compiler refused a kernel.
            DeviceError: A step asks for more than the device has, or for a library it has not.
        """

    def allocate_all(self, sizes: Sequence[int]) -> list[DeviceBuffer]:
        """Buffers that live as long as each other.

        Raises:
            OutOfMemoryError: The device has not that much memory for all of them.
        """
        return [self.allocate(nbytes) for nbytes in sizes]

    def allocate_visible(self, nbytes: int) -> DeviceBuffer:
        """Memory that device and host read and write where it lies.

        `DeviceBuffer.reading` copies nothing, and `DeviceBuffer.writing` gives the memory itself, which the host may
        go on to write to; a recording that is launched later finds what was written.

        Raises:
            OutOfMemoryError: There is not that much.
        """
        return self.allocate(nbytes)

    def clear(self, buffer: DeviceBuffer) -> None:
        """Fills a buffer with zeros."""
        with buffer.writing() as memory:
            memory[:] = 0

    def record(self, bound: Sequence[BoundPlan]) -> Recording:
        """Makes plans ready to run one after another, on this very memory, as often as asked.

        Raises:
            DeviceError: The device refused a command.
        """
        return Recording(bound)

    def write(self, array: NDArray[Any], spec: BufferSpec, buffer: DeviceBuffer) -> None:
        """Fills a buffer with `array` (shape `spec.shape`) in the dtype and layout of `spec`.

        Several threads may fill buffers at once.

        Raises:
            InputError: `array` does not fit `spec`.
        """
        with buffer.writing() as memory:
            spec.encode_into(array, memory)

    def upload(self, array: NDArray[Any], spec: BufferSpec) -> DeviceBuffer:
        """A new buffer that holds `array` (shape `spec.shape`) in the dtype and layout of `spec`; one copy.

        Raises:
            InputError: `array` does not fit `spec`.
            OutOfMemoryError: The device has not that much memory.
        """
        buffer = self.allocate(spec.nbytes)
        started = perf_counter()
        self.write(array, spec, buffer)
        self.transfers.uploads.add(spec.nbytes, perf_counter() - started)
        return buffer

    def download(self, buffer: DeviceBuffer, spec: BufferSpec) -> NDArray[Any]:
        """The tensor of shape `spec.shape` and dtype `spec.host_dtype` that `buffer` holds, as a new array."""
        started = perf_counter()
        array = spec.decode(buffer.reading())
        self.transfers.downloads.add(spec.nbytes, perf_counter() - started)
        return array
