"""Arrays of the host that are copied into pinned memory while the kernel that reads them waits for each part."""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from math import prod
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.backend import SMALL_BYTES, CUDABackend
from cuda_runtime.conversion import MOST_DIMENSIONS, joined_dimensions, kernel_of, numbers_text, tensor_struct
from cuda_runtime.device import CUDABuffer, Flag
from cuda_runtime.inputs import Input
from npu_compiler.errors import InputError
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["Arrival", "Streamed", "streamed_text"]

_LEAST_BYTES = 1 << 16  # what is smaller is there sooner than a graph begins
_SECTION_BYTES = 1 << 17
_PATIENCE = 50_000_000  # nanoseconds that a kernel waits; a host that does nothing else is done after 50,000
# Nanoseconds after which all that is left is one section: each may cost the interpreter's lock, for 5 ms where other
# threads compute.
_HELD_UP = 1_000_000
# A waiting kernel leaves room for all others, and what it has on its way fills the bus: 64 KiB and more.
_MOST_BLOCKS, _THREADS, _EACH = 32, 256, 4

# A word is seen behind the bytes that were stored ahead of it: processors of this kind keep stores in order.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")

_WORDS = 1 << 32
_BEGUN, _ARRIVED, _LATE = range(3)
_copy_bits = np.bitwise_or  # of a number and nothing
_NOTHING = {size: np.zeros((), f"u{size}") for size in (1, 2, 4, 8)}

_KERNEL = """
// Words in memory of the host: what had arrived when the run began, what has arrived, and whether a kernel gave up.
struct Words {
  unsigned begun, arrived, late;
};
struct Streamed {
  Tensor tensor;
  unsigned first, section;
};

static unsigned read_word(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

static unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// How many sections behind `begun` are there, once the needed ones are. Who has waited for too long goes on regardless:
// the host then throws the result away.
static unsigned wait_for(Words* words, unsigned begun, unsigned needed, unsigned long long latest) {
  for (;;) {
    unsigned ready = read_word(&words->arrived) - begun;
    if ((int)(ready - needed) >= 0) return ready;
    if (nanoseconds() > latest) {
      *(volatile unsigned*)&words->late = 1u;
      return 0x7fffffffu;
    }
    __nanosleep(40);
  }
}

extern "C" __global__ void convert_streamed(unsigned* lost, Words* words, const __grid_constant__ Streamed job) {
  __shared__ unsigned found;
  const Tensor& tensor = job.tensor;
  const unsigned count = (unsigned)tensor.count;
  unsigned ready = 0, begun = 0;
  unsigned long long latest = nanoseconds() + PATIENCE;
  if (threadIdx.x == 0) begun = read_word(&words->begun) + job.first;
  for (unsigned start = blockIdx.x * CHUNK; start < count; start += gridDim.x * CHUNK) {
    unsigned stop = start + CHUNK < count ? start + CHUNK : count;
    unsigned needed = (stop - 1) / job.section + 1;
    if (needed > ready) {
      __syncthreads();
      if (threadIdx.x == 0) found = wait_for(words, begun, needed, latest);
      __syncthreads();
      ready = found;
    }
    Source given[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      unsigned i = start + k * THREADS + threadIdx.x;
      if (i < stop) given[k] = tensor.source[i];
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      unsigned i = start + k * THREADS + threadIdx.x;
      if (i >= stop) break;
      long long to = 0;
      for (int d = tensor.rank - 1; d >= 0; --d) {
        unsigned rest = i / tensor.sizes[d];
        to += (i - rest * tensor.sizes[d]) * tensor.to[d];
        i = rest;
      }
      number x, y;
      read(given[k], x);
      Target stored;
      write(x, stored);
      read(stored, y);
      tensor.target[to] = stored;
      if (is_lost(x, y)) *lost = 1u;
    }
  }
}
"""


class Arrival:
    """How much of the arrays of an executor's runs lies in pinned memory, said to kernels that were launched before.

    Sections are counted through all runs, modulo 2^32, so that nothing is ever set back. A kernel that has waited for
    too long goes on, so that the device is never blocked: by a thread that is held up, by another one that waits for
    the device while it has the interpreter's lock, by a debugger. `was_late` then says so, and nobody uses the results.

    Attributes:
        pointer: The address of the words.
    """

    def __init__(self, device: CUDABackend) -> None:
        """Allocates the words."""
        self._memory = device.allocate_visible(struct.calcsize("3I"))
        self._memory.content[:] = 0
        self._words = self._memory.content.data.cast("I")
        self.pointer = self._memory.pointer
        self._sections = self._end = 0

    def take(self, sections: int) -> int:
        """Gives an input its own sections of each run: the number of the first."""
        first = self._sections
        self._sections += sections
        return first

    def launch(self, graph: Any, stream: Any, inputs: Sequence[tuple[Streamed, NDArray[Any]]]) -> None:
        """Launches a graph, then fills what its kernels wait for.

        Args:
            graph: The graph.
            stream: Where it is launched.
            inputs: The arrays, by their first sections. All runs that read the same memory are over.

        Raises:
            BaseException: What came in between. The kernels wait no longer, and what they make is not to be used.
        """
        words, begun = self._words, self._end
        end = self._end = (begun + self._sections) % _WORDS
        words[_BEGUN] = begun
        try:
            graph.launch(stream)
            soon = perf_counter_ns() + _HELD_UP
            for each, value in inputs:
                before, numbers = begun + each.first, each.numbers(value)
                for section, rest in each.targets:
                    is_held_up = perf_counter_ns() > soon
                    part, target, arrived = rest if is_held_up else section
                    _copy_bits(numbers[part], each.nothing, target)
                    words[_ARRIVED] = (before + arrived) % _WORDS
                    if is_held_up:
                        break
        finally:
            words[_ARRIVED] = end  # nothing is called here, so that no second interrupt comes in between

    def was_late(self) -> bool:
        """Whether a kernel gave up since this was asked last. All runs are over."""
        if not self._words[_LATE]:
            return False
        self._words[_LATE] = 0
        return True


class _Target(NamedTuple):
    """A part of an array, where it goes, and how many sections are then there."""

    part: slice
    pinned: NDArray[Any]
    arrived: int


class Streamed(Input):
    """Copied into pinned memory section by section, behind the launch of the graph whose first kernel reads it there.

    The copy is a bitwise operation of numpy's, which uses wide registers; the C library's copy of such a section takes
    ten times as long on some processors. The array must not change until the run is over: it is for runs waited for.

    Attributes:
        first: The number of the first section, see `Arrival`.
        targets: Each section of the array, and all of the array from there on.
        nothing: What leaves numbers as they are when it is or-ed to them.
    """

    def __init__(
        self,
        device: CUDABackend,
        memory: CUDABuffer,
        spec: BufferSpec,
        dtype: np.dtype[Any],
        checked: bool,
        arrival: Arrival,
    ) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        dtype: Of the caller's array, which has `spec.shape`.
        checked: Whether numbers that the plan's data type does not hold are refused.
        arrival: What says how much is there.
        """
        self.pointer, self._spec, self._checked, self._arrival = memory.pointer, spec, checked, arrival
        count = prod(spec.shape)
        self._pinned = device.allocate_visible(count * dtype.itemsize)
        with device.active():
            self._lost = Flag(device)
            source = self._pinned.array.view(dtype).reshape(spec.shape)
            target = memory.view(spec)
            dimensions = joined_dimensions(source, target, True)
            text = streamed_text(str(source.dtype), str(target.dtype))
            self._kernel = kernel_of(device.ordinal, text, "convert_streamed")
        self._section = _SECTION_BYTES // dtype.itemsize
        sections = ceil_div(count, self._section)
        self.first = arrival.take(sections)
        self._job = tensor_struct(source, target, dimensions) + struct.pack("<II", self.first, self._section)
        self._blocks = min(_MOST_BLOCKS, ceil_div(count, _THREADS * _EACH))
        self.nothing = _NOTHING[dtype.itemsize]
        self._bits = self.nothing.dtype
        pinned = self._pinned.content.view(self._bits)
        self.targets: list[tuple[_Target, _Target]] = []
        for number in range(sections):
            here = slice(number * self._section, min((number + 1) * self._section, count))
            rest = slice(here.start, count)
            self.targets.append((_Target(here, pinned[here], number + 1), _Target(rest, pinned[rest], sections)))
        self._value: NDArray[Any] | None = None

    @staticmethod
    def serves(spec: BufferSpec, value: NDArray[Any]) -> bool:
        """Whether an array may come so."""
        fits = _LEAST_BYTES <= value.nbytes <= SMALL_BYTES and len(spec.shape) <= MOST_DIMENSIONS
        is_number = spec.dtype.is_float and spec.dtype.coding is None and value.itemsize in _NOTHING
        return _KEEPS_ORDER and fits and is_number and value.dtype.isnative and value.flags.c_contiguous

    def ask(self, stream: Any) -> None:
        """Asks a stream for the kernel that waits for the array."""
        addresses = self._lost.array.data.ptr, self._arrival.pointer
        grid, block = (self._blocks, 1, 1), (_THREADS, 1, 1)
        self._kernel.launch(grid, block, (1, 1, 1), 0, addresses, self._job, stream.ptr, False)

    def receive(self, value: Any) -> None:
        self._value = value

    def numbers(self, value: NDArray[Any]) -> NDArray[Any]:
        """An array in one dimension, as unsigned integers."""
        return np.asarray(value).reshape(-1).view(self._bits)

    def refusal(self) -> InputError | None:
        """What to say, once the run is over, where the array has numbers that the plan's data type does not hold."""
        value, self._value = self._value, None
        if not self._lost.taken() or value is None or not self._checked:
            return None
        return self._spec.too_large(value)


def streamed_text(source: str, target: str) -> str:
    """CUDA C++ from one dtype to another, by their names: ``convert_streamed``."""
    return (
        f"{numbers_text(source, target)}"
        f"#define THREADS {_THREADS}\n#define EACH {_EACH}\n#define CHUNK (THREADS * EACH)\n"
        f"#define PATIENCE {_PATIENCE}ull\n{_KERNEL}"
    )
