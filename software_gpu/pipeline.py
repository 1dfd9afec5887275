"""A kernel as a dispatch needs it, and the rules of Metal's validation layer that concern its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.errors import DeviceError
from npu_compiler.integers import ceil_div
from software_gpu.library import Argument, CompiledKernel
from software_gpu.native_runtime import BUFFER_SLOTS
from software_gpu.resources import MTLBuffer, MTLSize

__all__ = ["MAX_THREADGROUP_BYTES", "MAX_THREADS", "SIMD_WIDTH", "Binding", "MTLComputePipelineState"]

MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32768
SIMD_WIDTH = 32
_THREADGROUP_ALIGNMENT = 16

Binding = tuple[MTLBuffer, int]  # a buffer and the offset its argument begins at


class MTLComputePipelineState:
    """A kernel that can be dispatched."""

    def __init__(self, kernel: CompiledKernel) -> None:
        if kernel.threadgroup_bytes - kernel.red_zone_bytes > MAX_THREADGROUP_BYTES:
            raise DeviceError(
                f"kernel '{kernel.name}' declares {kernel.threadgroup_bytes} bytes of threadgroup memory; "
                f"a threadgroup has {MAX_THREADGROUP_BYTES}. Make its tiles smaller"
            )
        self.kernel = kernel

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return MAX_THREADS

    def threadExecutionWidth(self) -> int:
        return SIMD_WIDTH

    def staticThreadgroupMemoryLength(self) -> int:
        return self.kernel.threadgroup_bytes

    def entry(self, threads: MTLSize, grid: MTLSize) -> int:
        """Address of the native code that runs threadgroups of this shape, the last ones cut by the grid."""
        entries = self.kernel.entries
        if "loop" in entries:
            return entries["loop"]
        flat = threads.height == threads.depth == 1
        whole_simdgroups = flat and threads.width % SIMD_WIDTH == 0 and grid.width % SIMD_WIDTH == 0
        if "region" in entries and (whole_simdgroups or self.kernel.region_shape == "x_rows"):
            return entries["region"]
        return self.kernel.on_fibers()

    def check_bindings(self, bindings: Mapping[int, Binding]) -> None:
        """Every argument is bound, aligned and, where its type says how large it is, large enough."""
        for argument in self.kernel.arguments:
            binding = bindings.get(argument.index)
            if binding is None:
                raise DeviceError(f"{self._where(argument)} is not bound. Call setBuffer or setBytes first")
            buffer, offset = binding
            if offset % argument.alignment:
                raise DeviceError(
                    f"{self._where(argument)} is bound at offset {offset}; its type needs a multiple of "
                    f"{argument.alignment}"
                )
            if argument.is_reference and buffer.length() - offset < argument.bytes:
                raise DeviceError(
                    f"{self._where(argument)} is bound to {buffer.length() - offset} bytes and its type has "
                    f"{argument.bytes}. Bind a buffer that holds the whole struct"
                )

    def threadgroup_layout(self, lengths: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """Where threadgroup memory that the host sizes begins, and where all of it ends."""
        for index, name in self.kernel.threadgroup_arguments.items():
            if not lengths.get(index):
                raise DeviceError(
                    f"kernel '{self.kernel.name}', argument '{name}' [[threadgroup({index})]] has no length. "
                    "Call setThreadgroupMemoryLength_atIndex_ before dispatching"
                )
        end = ceil_div(self.kernel.threadgroup_bytes, _THREADGROUP_ALIGNMENT) * _THREADGROUP_ALIGNMENT
        offsets = {}
        for index in sorted(self.kernel.threadgroup_arguments):
            offsets[index] = end
            end += lengths[index]
        if end - self.kernel.red_zone_bytes > MAX_THREADGROUP_BYTES:
            raise DeviceError(
                f"kernel '{self.kernel.name}' needs {end} bytes of threadgroup memory "
                f"({self.kernel.threadgroup_bytes} declared, {end - self.kernel.threadgroup_bytes} set by the host); "
                f"a threadgroup has {MAX_THREADGROUP_BYTES}"
            )
        return offsets, end

    def check_threads(self, threads: MTLSize, grid: MTLSize, grid_unit: str) -> None:
        """Sizes are positive and a threadgroup holds no more threads than it may."""
        if min(threads) < 1 or min(grid) < 1:
            raise DeviceError(
                f"kernel '{self.kernel.name}': {tuple(grid)} {grid_unit} of {tuple(threads)} threads; "
                "every size must be at least 1. Skip the dispatch when there is nothing to do"
            )
        total = threads.width * threads.height * threads.depth
        if total > MAX_THREADS:
            raise DeviceError(
                f"kernel '{self.kernel.name}': {tuple(threads)} is {total} threads in a threadgroup; "
                f"the most is {MAX_THREADS}"
            )

    def _where(self, argument: Argument) -> str:
        return f"kernel '{self.kernel.name}', argument '{argument.name}' [[buffer({argument.index})]]"


def check_buffer_index(index: int) -> None:
    """Metal has 31 places for buffers."""
    if not 0 <= index < BUFFER_SLOTS:
        raise DeviceError(f"buffer index {index} was given; Metal has 0 to {BUFFER_SLOTS - 1}")
