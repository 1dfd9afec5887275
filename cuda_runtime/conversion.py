"""Tensors converted on the device: data type and order of dimensions, on the way in and on the way out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from cuda_runtime.cupy_api import cupy
from cuda_runtime.driver import Kernel, Module
from cuda_runtime.kernel_cache import compiled_kernels
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.integers import ceil_div

__all__ = ["Conversion", "ask_all", "conversion_text"]

_BLOCK = 256
_WIDE = 16  # bytes that a thread reads over the bus at once: small requests are what keeps it from its pace
_WIDE_BLOCK = 64
_MOST_DIMENSIONS = 8  # of those that are left where neighbours are joined
_SMALL = 1 << 31  # elements, up to which indices have 32 bits

_SIDE, _LEAST_SIDE = 64, 16  # of the squares in which a tensor is turned, and of one for which that is worth it
_TURNED = 1 << 18  # elements from which on squares keep all multiprocessors busy
_TOGETHER = 1 << 16  # elements of a tensor that is converted in one launch with others
_BATCH = 8  # tensors of a launch, the most
_LAYOUT = f"<QQQ{_MOST_DIMENSIONS}q{_MOST_DIMENSIONS}q{_MOST_DIMENSIONS}Ii4x"
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Dimension = tuple[int, int, int]  # size, stride in the source, stride in the target

# How an element is stored, and computed with, by the name of its data type.
_STORED = {
    "bool": ("unsigned char", "unsigned char"),
    "uint8": ("unsigned char", "long long"),
    "int8": ("signed char", "long long"),
    "int16": ("short", "long long"),
    "int32": ("int", "long long"),
    "int64": ("long long", "long long"),
    "float16": ("half_bits", "float"),
    "bfloat16": ("bfloat_bits", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}
_TEXT = """
struct half_bits { unsigned short bits; };
struct bfloat_bits { unsigned short bits; };

static void read(unsigned char stored, number& x) { x = stored; }
static void read(signed char stored, number& x) { x = stored; }
static void read(short stored, number& x) { x = stored; }
static void read(int stored, number& x) { x = stored; }
static void read(long long stored, number& x) { x = stored; }
static void read(float stored, number& x) { x = stored; }
static void read(double stored, number& x) { x = stored; }
static void read(half_bits stored, number& x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(stored.bits));
  x = wide;
}
static void read(bfloat_bits stored, number& x) { x = __int_as_float((int)stored.bits << 16); }

static void write(number x, unsigned char& stored) { stored = (unsigned char)x; }
static void write(number x, signed char& stored) { stored = (signed char)x; }
static void write(number x, short& stored) { stored = (short)x; }
static void write(number x, int& stored) { stored = (int)x; }
static void write(number x, long long& stored) { stored = (long long)x; }
static void write(number x, float& stored) { stored = (float)x; }
static void write(number x, double& stored) { stored = x; }
static void write(float x, half_bits& stored) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x)); }
static void write(double x, half_bits& stored) { asm("cvt.rn.f16.f64 %0, %1;" : "=h"(stored.bits) : "d"(x)); }
static void write(float x, bfloat_bits& stored) {
  unsigned bits = __float_as_int(x);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  stored.bits = is_nan ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
static void write(double x, bfloat_bits& stored) { write((float)x, stored); }

// Whether a number became another: integers by their low bits, floating-point numbers by infinity.
static bool is_lost(long long x, long long y) { return x != y; }
static bool is_lost(unsigned char x, unsigned char y) { return false; }
static bool is_lost(double x, double y) { return y - y != 0.0 && y == y && (NOTES_INFINITY || x - x == 0.0); }

struct Tensor {
  const Source* source;
  Target* target;
  unsigned long long count;
  long long from[MOST], to[MOST];
  unsigned sizes[MOST];
  int rank;
};
struct Batch {
  Tensor tensors[BATCH];
};

template <class Index> static void find(const Tensor& tensor, Index i, long long& from, long long& to) {
  from = to = 0;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    Index rest = i / tensor.sizes[d], at = i - rest * tensor.sizes[d];
    i = rest;
    from += at * tensor.from[d], to += at * tensor.to[d];
  }
}

// Gives whether the number became another.
static bool convert(Source stored, Target& made) {
  number x, y;
  read(stored, x);
  write(x, made);
  read(made, y);
  return is_lost(x, y);
}

template <class Index> static void convert_each(const Tensor& tensor, unsigned* lost) {
  Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= tensor.count) return;
  long long from, to;
  find(tensor, i, from, to);
  Target made;
  if (convert(tensor.source[from], made)) *lost = 1u;
  tensor.target[to] = made;
}

// Squares of the last two dimensions, of which the last has neighbours in the target and the one before in the source:
// read and written side by side. No two elements of a column lie in one bank.
static void convert_turned_square(const Tensor& tensor, unsigned* lost) {
  __shared__ Target square[SIDE][SIDE + (sizeof(Target) < 4 ? 4 / sizeof(Target) : 1)];
  const int line = tensor.rank - 2, last = tensor.rank - 1, lane = threadIdx.x % SIDE, first = threadIdx.x / SIDE;
  unsigned rows = tensor.sizes[line], columns = tensor.sizes[last], block = blockIdx.x;
  unsigned across = (columns + SIDE - 1) / SIDE, down = (rows + SIDE - 1) / SIDE;
  unsigned column = block % across * SIDE, row = block / across % down * SIDE;
  block /= across * down;
  long long from = row * tensor.from[line] + column * tensor.from[last];
  long long to = row * tensor.to[line] + column * tensor.to[last];
  for (int d = line - 1; d >= 0; --d) {
    unsigned rest = block / tensor.sizes[d], at = block - rest * tensor.sizes[d];
    block = rest;
    from += at * tensor.from[d], to += at * tensor.to[d];
  }
#pragma unroll 8
  for (int i = first; i < SIDE; i += THREADS / SIDE) {
    if (row + lane < rows && column + i < columns) {
      Target made;
      if (convert(tensor.source[from + lane * tensor.from[line] + i * tensor.from[last]], made)) *lost = 1u;
      square[i][lane] = made;
    }
  }
  __syncthreads();
#pragma unroll 8
  for (int i = first; i < SIDE; i += THREADS / SIDE) {
    if (column + lane < columns && row + i < rows) {
      tensor.target[to + i * tensor.to[line] + lane * tensor.to[last]] = square[lane][i];
    }
  }
}

// As many neighbours as lie in 16 bytes of the source, of which a line is a multiple.
extern "C" __global__ void convert_wide(unsigned* lost, const __grid_constant__ Batch batch) {
  const Tensor& tensor = batch.tensors[blockIdx.y];
  unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * (WIDE / (unsigned)sizeof(Source));
  if (i >= tensor.count) return;
  long long from, to;
  find(tensor, i, from, to);
  union {
    uint4 all;
    Source each[WIDE / sizeof(Source)];
  } stored;
  stored.all = *(const uint4*)(tensor.source + from);
  const long long step = tensor.to[tensor.rank - 1];
  bool is_any_lost = false;
#pragma unroll
  for (int k = 0; k < WIDE / sizeof(Source); ++k) {
    Target made;
    is_any_lost |= convert(stored.each[k], made);
    tensor.target[to + k * step] = made;
  }
  if (is_any_lost) *lost = 1u;
}

extern "C" __global__ void convert_turned(unsigned* lost, const __grid_constant__ Batch batch) {
  convert_turned_square(batch.tensors[blockIdx.y], lost);
}
extern "C" __global__ void convert_small(unsigned* lost, const __grid_constant__ Batch batch) {
  convert_each<unsigned>(batch.tensors[blockIdx.y], lost);
}
extern "C" __global__ void convert_large(unsigned* lost, const __grid_constant__ Batch batch) {
  convert_each<unsigned long long>(batch.tensors[blockIdx.y], lost);
}
"""


class Conversion:
    """How an array becomes another of the same shape, of any data type of its kind and any strides.

    Numbers are rounded to the nearest. What is too large for a floating-point type becomes infinite.
    """

    def __init__(
        self, source: Any, target: Any, *, from_host: bool = False, flag: Any = None, notes_infinity: bool = False
    ) -> None:
        """Finds, and compiles where it is new, what it takes.

        Args:
            source, target: CuPy arrays in device memory, or in pinned memory of the host that the device reaches; both
                of booleans, of integers or of floating-point numbers.
            from_host: Whether the source is read over the bus, which wants neighbours read together more than the
                device's own memory wants them written so.
            flag: What is set in the place of `ask`'s; it must live as long as this.
            notes_infinity: Whether a number that is infinite already counts as lost, too.

        Raises:
            KernelCompileError, MissingDependencyError: There is no compiler that works.
        """
        self._copy: tuple[int, int, int] | None = None
        self._parts: list[_Part] = []
        if not source.size:
            return
        same = source.dtype == target.dtype and source.flags.c_contiguous and target.flags.c_contiguous
        if same and not notes_infinity:
            self._copy = source.data.ptr, target.data.ptr, source.nbytes
            if source.size > _TOGETHER:
                return
            kind = _BITS[source.itemsize]  # the very bits, where it is made together with others
            source, target = source.reshape(-1).view(kind), target.reshape(-1).view(kind)
        self._parts.extend(_parts(source, target, from_host, flag, notes_infinity))

    def ask(self, stream: Any, overflow: Any) -> None:
        """Asks a stream for it, as `ask_all` does for several."""
        if self._copy is None:
            for part in self._parts:
                _launch([part], stream, overflow)
            return
        (source, target, nbytes), runtime = self._copy, cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream.ptr)

    def small_parts(self) -> Sequence[_Part]:
        """What it consists of, if all of that may share launches with others."""
        return [] if any(part.size > _TOGETHER for part in self._parts) else self._parts


def ask_all(conversions: Iterable[Conversion], stream: Any, overflow: Any) -> None:
    """Asks a stream for some conversions, the small ones in as few launches as can be.

    Args:
        conversions: In any order; none reads what another writes.
        stream: The stream; its device is the current one.
        overflow: A uint32 of shape [1], which becomes 1 where a finite number becomes infinite, or an integer another.
    """
    together: dict[tuple[Kernel, int], list[_Part]] = {}
    for conversion in conversions:
        small = conversion.small_parts()
        for part in small:
            together.setdefault((part.kernel, part.flag), []).append(part)
        if not small:
            conversion.ask(stream, overflow)
    for parts in together.values():
        for first in range(0, len(parts), _BATCH):
            _launch(parts[first : first + _BATCH], stream, overflow)


class _Part(NamedTuple):
    """A tensor that a kernel converts: the address of its own flag or 0, what the kernel is told, size and blocks."""

    kernel: Kernel
    flag: int
    described: bytes
    size: int
    blocks: int
    threads: int  # of a block


def _parts(source: Any, target: Any, from_host: bool, flag: Any, notes_infinity: bool) -> Iterator[_Part]:
    dimensions = _joined(source, target, from_host)
    if len(dimensions) > _MOST_DIMENSIONS:
        for row in zip(source, target, strict=True):
            yield from _parts(*row, from_host, flag, notes_infinity)
        return
    count = prod(size for size, _, _ in dimensions)
    entry, threads = "convert_small" if count <= _SMALL else "convert_large", _BLOCK
    blocks = ceil_div(count, threads)
    if from_host and count <= _SMALL and _is_wide(dimensions, source):
        entry, threads = "convert_wide", _WIDE_BLOCK
        blocks = ceil_div(count * source.itemsize, _WIDE * threads)
    elif count >= _TURNED and not from_host and (turned := _turned(dimensions)):
        *outer, (rows, _, _), (columns, _, _) = dimensions = turned
        blocks = prod(size for size, _, _ in outer) * ceil_div(rows, _SIDE) * ceil_div(columns, _SIDE)
        entry = "convert_turned"
    rest = [0] * (_MOST_DIMENSIONS - len(dimensions))
    sizes, reads, writes = ([each[part] for each in dimensions] + rest for part in range(3))
    places = source.data.ptr, target.data.ptr
    described = struct.pack(_LAYOUT, *places, count, *reads, *writes, *sizes, len(dimensions))
    text = conversion_text(str(source.dtype), str(target.dtype), notes_infinity=notes_infinity)
    kernel = _kernel(target.device.id, text, entry)
    yield _Part(kernel, 0 if flag is None else flag.data.ptr, described, count, blocks, threads)


def _is_wide(dimensions: Sequence[Dimension], source: Any) -> bool:
    """Whether each line of the source begins and ends where `_WIDE` bytes do."""
    *outer, (size, read, _) = dimensions or [(1, 0, 0)]
    places = (size * read, *(stride for _, stride, _ in outer))
    return read == 1 and not any(place * source.itemsize % _WIDE for place in places) and source.data.ptr % _WIDE == 0


def _turned(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Dimensions with neighbours in the source ahead of those with neighbours in the target, which come last.

    Empty where these are the same or too few.
    """
    *others, last = dimensions
    found = [each for each in others if each[1] == 1 and each[0] >= _LEAST_SIDE]
    if not found or last[2] != 1 or last[1] == 1 or last[0] < _LEAST_SIDE:
        return []
    return [*(each for each in others if each is not found[0]), found[0], last]


def _launch(parts: Sequence[_Part], stream: Any, overflow: Any) -> None:
    """One launch, of parts that one kernel converts."""
    grid = max(part.blocks for part in parts), len(parts), 1
    batch = b"".join(part.described for part in parts).ljust(_BATCH * struct.calcsize(_LAYOUT), b"\0")
    parts[0].kernel.launch(
        grid, (parts[0].threads, 1, 1), (1, 1, 1), 0, (parts[0].flag or overflow.data.ptr,), batch, stream.ptr, False
    )


def conversion_text(source: str, target: str, *, notes_infinity: bool = False) -> str:
    """CUDA C++ from one dtype to another, by their names: `_parts` says which of its kernels serves what."""
    (read, first), (written, second) = _STORED[source], _STORED[target]
    number = "double" if "double" in (first, second) else first
    return (
        f"#define MOST {_MOST_DIMENSIONS}\n#define BATCH {_BATCH}\n#define NOTES_INFINITY {int(notes_infinity)}\n"
        f"#define SIDE {_SIDE}\n#define THREADS {_BLOCK}\n#define WIDE {_WIDE}\n"
        "struct half_bits;\nstruct bfloat_bits;\n"
        f"typedef {number} number;\ntypedef {read} Source;\ntypedef {written} Target;\n{_TEXT}"
    )


@cache
def _kernel(ordinal: int, text: str, entry: str) -> Kernel:
    with cupy().cuda.Device(ordinal) as device:
        (code,) = compiled_kernels([KernelSource(entry, text)], int(device.compute_capability))
        return Module(code).kernel(entry, 0)


def _joined(source: Any, target: Any, by_source: bool) -> list[Dimension]:
    """The dimensions of two arrays by falling stride in one of them, neighbours that lie alike in both joined."""
    every = zip(source.shape, source.strides, target.strides, strict=True)
    dimensions = [(n, a // source.itemsize, b // target.itemsize) for n, a, b in every if n != 1]
    joined: list[Dimension] = []
    for size, read, written in sorted(dimensions, key=lambda each: -abs(each[1 if by_source else 2])):
        if joined and joined[-1][1:] == (read * size, written * size):
            joined[-1] = (joined[-1][0] * size, read, written)
        else:
            joined.append((size, read, written))
    return joined
