"""Tensors converted on the device: data type and order of dimensions, on the way in and on the way out."""

from __future__ import annotations

import struct
from functools import cache
from math import prod
from typing import Any

from cuda_runtime.cupy_api import cupy
from cuda_runtime.driver import Kernel, Module
from cuda_runtime.kernel_cache import compiled_kernels
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.integers import ceil_div

__all__ = ["Conversion", "conversion_text"]

_BLOCK = 256
_MOST_DIMENSIONS = 8  # of those that are left where neighbours are joined
_SMALL = 1 << 31  # elements, up to which indices have 32 bits

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

struct Shape {
  unsigned long long count;
  long long from[MOST], to[MOST];
  unsigned sizes[MOST];
  int rank;
};

template <class Index> static void convert(const Source* source, Target* target, unsigned* lost, const Shape& shape) {
  Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= shape.count) return;
  long long from = 0, to = 0;
  for (int d = shape.rank - 1; d >= 0; --d) {
    Index rest = i / shape.sizes[d], at = i - rest * shape.sizes[d];
    i = rest;
    from += at * shape.from[d], to += at * shape.to[d];
  }
  number x, y;
  read(source[from], x);
  Target stored;
  write(x, stored);
  read(stored, y);
  target[to] = stored;
  if (is_lost(x, y)) *lost = 1u;
}

extern "C" __global__ void convert_small(const Source* source, Target* target, unsigned* lost, Shape shape) {
  convert<unsigned>(source, target, lost, shape);
}
extern "C" __global__ void convert_large(const Source* source, Target* target, unsigned* lost, Shape shape) {
  convert<unsigned long long>(source, target, lost, shape);
}
"""


class Conversion:
    """How an array becomes another of the same shape, of any data type of its kind and any strides.

    Numbers are rounded to the nearest. What is too large for a floating-point type becomes infinite.
    """

    def __init__(self, source: Any, target: Any, *, from_host: bool = False, notes_infinity: bool = False) -> None:
        """Finds, and compiles where it is new, what it takes.

        Args:
            source, target: CuPy arrays in device memory, or in pinned memory of the host that the device reaches; both
                of booleans, of integers or of floating-point numbers.
            from_host: Whether the source is read over the bus, which wants neighbours read together more than the
                device's own memory wants them written so.
            notes_infinity: Whether a number that is infinite already counts as lost, too.

        Raises:
            KernelCompileError, MissingDependencyError: There is no compiler that works.
        """
        self._places = source.data.ptr, target.data.ptr
        self._nbytes = source.nbytes
        self._parts: list[Conversion] = []
        self._kernel: Kernel | None = None
        is_copy = source.dtype == target.dtype and source.flags.c_contiguous and target.flags.c_contiguous
        if (is_copy and not notes_infinity) or not source.size:
            return
        dimensions = _joined(source, target, from_host)
        if len(dimensions) > _MOST_DIMENSIONS:
            self._parts = [
                Conversion(*row, from_host=from_host, notes_infinity=notes_infinity)
                for row in zip(source, target, strict=True)
            ]
            return
        count = prod(size for size, _, _ in dimensions)
        rest = [0] * (_MOST_DIMENSIONS - len(dimensions))
        sizes, reads, writes = ([each[part] for each in dimensions] + rest for part in range(3))
        layout = f"<Q{_MOST_DIMENSIONS}q{_MOST_DIMENSIONS}q{_MOST_DIMENSIONS}Ii4x"
        self._shape = struct.pack(layout, count, *reads, *writes, *sizes, len(dimensions))
        text = conversion_text(str(source.dtype), str(target.dtype), notes_infinity=notes_infinity)
        self._kernel = _kernel(target.device.id, text, count <= _SMALL)
        self._grid = (ceil_div(count, _BLOCK), 1, 1)

    def ask(self, stream: Any, overflow: Any) -> None:
        """Asks a stream for it; the stream's device is the current one.

        Args:
            stream: The stream.
            overflow: A uint32 of shape [1], which becomes 1 where a finite number becomes infinite, or an integer
                another.
        """
        for part in self._parts:
            part.ask(stream, overflow)
        if self._parts or not self._nbytes:
            return
        (source, target), runtime = self._places, cupy().cuda.runtime
        if self._kernel is None:
            runtime.memcpyAsync(target, source, self._nbytes, runtime.memcpyDefault, stream.ptr)
        else:
            places = source, target, overflow.data.ptr
            self._kernel.launch(self._grid, (_BLOCK, 1, 1), (1, 1, 1), 0, places, self._shape, stream.ptr, False)


def conversion_text(source: str, target: str, *, notes_infinity: bool = False) -> str:
    """CUDA C++ of the kernels ``convert_small`` and ``convert_large`` from one dtype to another, by their names."""
    (read, first), (written, second) = _STORED[source], _STORED[target]
    number = "double" if "double" in (first, second) else first
    return (
        f"#define MOST {_MOST_DIMENSIONS}\n#define NOTES_INFINITY {int(notes_infinity)}\n"
        "struct half_bits;\nstruct bfloat_bits;\n"
        f"typedef {number} number;\ntypedef {read} Source;\ntypedef {written} Target;\n{_TEXT}"
    )


@cache
def _kernel(ordinal: int, text: str, is_small: bool) -> Kernel:
    with cupy().cuda.Device(ordinal) as device:
        entry = "convert_small" if is_small else "convert_large"
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
