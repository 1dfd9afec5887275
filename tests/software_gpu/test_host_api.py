"""Metal's names, and what its validation layer refuses."""

from __future__ import annotations

import gc
import inspect
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from npu_compiler.errors import DeviceError
from software_gpu import commands, metal
from tests.software_gpu.harness import HEAD, device, pipeline, run, uints

SCALE = (
    HEAD
    + """
struct Params { uint count; float factor; };
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant Params& params [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < params.count) y[i] = x[i] * params.factor;
}
kernel void scratch(device float* y [[buffer(0)]], threadgroup float* memory [[threadgroup(0)]],
                    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float fixed[1024];
  fixed[i] = float(i);
  memory[i] = 2.0f * float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = fixed[63 - i] + memory[63 - i];
}
"""
)
PARAMS = np.array([4], np.uint32).tobytes() + np.array([2.5], np.float32).tobytes()


class Encoding:
    """An encoder ready to dispatch `scale`."""

    def __init__(self) -> None:
        gpu = device("fast")
        self.buffer = gpu.newBufferWithLength_options_(64, metal.MTLResourceStorageModeShared)
        self.command_buffer = gpu.newCommandQueue().commandBuffer()
        self.encoder = self.command_buffer.computeCommandEncoder()

    def bind_all(self) -> None:
        self.encoder.setComputePipelineState_(pipeline(SCALE, "scale"))
        self.encoder.setBuffer_offset_atIndex_(self.buffer, 0, 0)
        self.encoder.setBuffer_offset_atIndex_(self.buffer, 0, 1)
        self.encoder.setBytes_length_atIndex_(PARAMS, 8, 2)

    def dispatch(self, groups: tuple[int, int, int] = (1, 1, 1), threads: tuple[int, int, int] = (32, 1, 1)) -> None:
        self.encoder.dispatchThreadgroups_threadsPerThreadgroup_(groups, threads)


@pytest.fixture
def encoding() -> Encoding:
    return Encoding()


def test_every_selector_is_metals() -> None:
    text = (Path(__file__).parent / "metal_selectors.txt").read_text()
    known = {line for line in text.splitlines() if line and not line.startswith("#")}
    classes = [
        *(metal.MTLDevice, metal.MTLLibrary, metal.MTLFunction, metal.MTLCommandQueue, metal.MTLCommandBuffer),
        *(commands.MTLComputeCommandEncoder, commands.MTLBlitCommandEncoder, metal.MTLComputePipelineState),
        *(metal.MTLBuffer, metal.MTLCompileOptions),
    ]
    of_objective_c = {"alloc", "new", "init"}
    internal = {"part", "lend", "take_back", "check_bindings", "check_threads", "entry", "threadgroup_layout"}
    for kind in classes:
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or name in of_objective_c | internal:
                continue
            assert name.replace("_", ":") in known, f"{kind.__name__}.{name}"
            arguments = len(inspect.signature(function).parameters) - 1
            assert arguments == name.count("_"), f"{kind.__name__}.{name} takes {arguments} arguments"


def test_constants_are_metals() -> None:
    assert metal.MTLResourceStorageModeShared == 0
    assert metal.MTLResourceStorageModePrivate == 32
    assert metal.MTLCommandBufferStatusCompleted == 4
    assert metal.MTLLanguageVersion3_1 == 196609
    assert metal.MTLSizeMake(1, 2, 3) == metal.MTLSize(1, 2, 3) == (1, 2, 3)


def test_commands_run_in_order_at_commit(encoding: Encoding) -> None:
    encoding.bind_all()
    contents = np.frombuffer(encoding.buffer.contents().as_buffer(64), np.float32)
    contents[:] = 1.0
    encoding.dispatch()
    encoding.dispatch()
    encoding.encoder.endEncoding()
    assert contents[0] == 1.0
    encoding.command_buffer.commit()
    encoding.command_buffer.waitUntilCompleted()
    assert list(contents[:5]) == [6.25] * 4 + [1.0]
    assert encoding.command_buffer.status() == metal.MTLCommandBufferStatusCompleted
    assert encoding.command_buffer.GPUEndTime() >= encoding.command_buffer.GPUStartTime() > 0
    assert encoding.command_buffer.error() is None


def test_dispatch_threads_cuts_the_last_group() -> None:
    x = np.arange(100, dtype=np.float32)
    params = np.array([1000], np.uint32).tobytes() + np.array([2.0], np.float32).tobytes()
    _, y = run(SCALE, "scale", [x, np.zeros(100, np.float32), params], (1, 1, 1), (64, 1, 1), grid=(100, 1, 1))
    np.testing.assert_array_equal(y, 2 * x)


def test_threadgroup_memory_of_the_host() -> None:
    (y,) = run(SCALE, "scratch", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), threadgroup_lengths={0: 256})
    np.testing.assert_array_equal(y, 3.0 * np.arange(63, -1, -1))
    assert pipeline(SCALE, "scratch").staticThreadgroupMemoryLength() == 4096


def test_blits() -> None:
    gpu = device("fast")
    source = gpu.newBufferWithBytes_length_options_(bytes(range(16)), 16, 0)
    target = gpu.newBufferWithLength_options_(16, 0)
    command_buffer = gpu.newCommandQueue().commandBuffer()
    encoder = command_buffer.blitCommandEncoder()
    encoder.fillBuffer_range_value_(target, (0, 16), 7)
    encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(source, 4, target, 8, 4)
    encoder.endEncoding()
    command_buffer.commit()
    assert bytes(target.contents().as_buffer(16)) == bytes([7] * 8 + [4, 5, 6, 7] + [7] * 4)


def test_memory_of_the_caller_is_used_in_place() -> None:
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    buffer = device("fast").newBufferWithBytesNoCopy_length_options_deallocator_(pages, mmap.PAGESIZE, 0, None)
    buffer.contents().as_buffer(4)[:] = b"same"
    assert pages[:4] == b"same"
    with pytest.raises(DeviceError, match="multiples of the page size"):
        device("fast").newBufferWithBytesNoCopy_length_options_deallocator_(pages, 100, 0, None)


def test_unbound_buffer_is_refused(encoding: Encoding) -> None:
    encoding.encoder.setComputePipelineState_(pipeline(SCALE, "scale"))
    encoding.encoder.setBuffer_offset_atIndex_(encoding.buffer, 0, 0)
    with pytest.raises(DeviceError, match=r"kernel 'scale', argument 'y' \[\[buffer\(1\)\]\] is not bound"):
        encoding.dispatch()


def test_struct_larger_than_what_is_bound_is_refused(encoding: Encoding) -> None:
    encoding.bind_all()
    encoding.encoder.setBytes_length_atIndex_(uints(4), 4, 2)
    with pytest.raises(DeviceError, match=r"argument 'params' \[\[buffer\(2\)\]\] is bound to 4 bytes"):
        encoding.dispatch()


def test_misaligned_offset_is_refused(encoding: Encoding) -> None:
    encoding.bind_all()
    encoding.encoder.setBuffer_offset_atIndex_(encoding.buffer, 2, 0)
    with pytest.raises(DeviceError, match=r"argument 'x' .* needs a multiple of 4"):
        encoding.dispatch()


REFUSED: dict[str, tuple[Callable[[Encoding], object], str]] = {
    "offset past the end": (lambda e: e.encoder.setBuffer_offset_atIndex_(e.buffer, 64, 0), "offset 64 is not inside"),
    "index of a buffer": (lambda e: e.encoder.setBuffer_offset_atIndex_(e.buffer, 0, 31), "buffer index 31"),
    "too many bytes": (lambda e: e.encoder.setBytes_length_atIndex_(bytes(5000), 5000, 2), "the most is 4096"),
    "fewer bytes than announced": (
        lambda e: e.encoder.setBytes_length_atIndex_(b"abc", 4, 2),
        "4 bytes were announced",
    ),
    "threadgroup length": (lambda e: e.encoder.setThreadgroupMemoryLength_atIndex_(20, 0), "multiples of 16"),
    "too many threads": (lambda e: e.dispatch((1, 1, 1), (32, 32, 2)), "2048 threads in a threadgroup"),
    "no threads": (lambda e: e.dispatch((1, 1, 1), (0, 1, 1)), "at least 1"),
    "no groups": (lambda e: e.dispatch((0, 1, 1)), "at least 1"),
    "commit while encoding": (lambda e: e.command_buffer.commit(), "an encoder is open"),
    "two encoders": (lambda e: e.command_buffer.blitCommandEncoder(), "previous encoder is still open"),
    "waiting before commit": (lambda e: e.command_buffer.waitUntilCompleted(), "before commit"),
    "empty buffer": (lambda e: device("fast").newBufferWithLength_options_(0, 0), "0 bytes"),
    "contents past the end": (lambda e: e.buffer.contents().as_buffer(65), "no 65 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, encoding: Encoding) -> None:
    call, message = REFUSED[case]
    encoding.bind_all()
    with pytest.raises(DeviceError, match=message):
        call(encoding)


def test_dispatch_without_pipeline_is_refused(encoding: Encoding) -> None:
    with pytest.raises(DeviceError, match="no pipeline"):
        encoding.dispatch()


def test_use_after_the_end_is_refused(encoding: Encoding) -> None:
    encoding.bind_all()
    encoding.encoder.endEncoding()
    with pytest.raises(DeviceError, match="after endEncoding"):
        encoding.dispatch()
    with pytest.raises(DeviceError, match="after endEncoding"):
        encoding.encoder.endEncoding()
    encoding.command_buffer.commit()
    with pytest.raises(DeviceError, match="committed already"):
        encoding.command_buffer.commit()
    with pytest.raises(DeviceError, match="was committed"):
        encoding.command_buffer.computeCommandEncoder()


def test_threadgroup_memory_beyond_the_limit_is_refused(encoding: Encoding) -> None:
    encoding.encoder.setComputePipelineState_(pipeline(SCALE, "scratch"))
    encoding.encoder.setBuffer_offset_atIndex_(encoding.buffer, 0, 0)
    with pytest.raises(DeviceError, match=r"argument 'memory' \[\[threadgroup\(0\)\]\] has no length"):
        encoding.dispatch()
    encoding.encoder.setThreadgroupMemoryLength_atIndex_(32768, 0)
    with pytest.raises(DeviceError, match=r"needs 36864 bytes of threadgroup memory \(4096 declared"):
        encoding.dispatch()


def test_static_threadgroup_memory_beyond_the_limit_makes_no_pipeline() -> None:
    source = HEAD + "kernel void k(device float* y [[buffer(0)]]) { threadgroup float a[8193]; a[0] = 1; y[0] = a[0]; }"
    library, _ = device("fast").newLibraryWithSource_options_error_(source, None, None)
    assert library is not None
    function = library.newFunctionWithName_("k")
    assert function is not None
    state, error = device("fast").newComputePipelineStateWithFunction_error_(function, None)
    assert state is None
    assert "32772 bytes of threadgroup memory" in str(error)


def test_macros_and_names_of_functions() -> None:
    options = metal.MTLCompileOptions.alloc().init()
    options.setPreprocessorMacros_({"NAME": "renamed"})
    options.setLanguageVersion_(metal.MTLLanguageVersion3_1)
    options.setFastMathEnabled_(False)
    source = HEAD + "kernel void NAME(device float* y [[buffer(0)]]) { y[0] = 1.0f; }"
    library, error = device("fast").newLibraryWithSource_options_error_(source, options, None)
    assert error is None
    assert library is not None
    assert library.functionNames() == ["renamed"]
    assert library.newFunctionWithName_("NAME") is None


def test_a_recording_runs_on_other_buffers_and_holds_none() -> None:
    x, y = (device("fast").newBufferWithLength_options_(128, 0) for _ in range(2))
    command_buffer = device("fast").newCommandQueue().commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    source = HEAD + (
        "kernel void add(device float* x [[buffer(0)]], constant float& y [[buffer(1)]], "
        "uint i [[thread_position_in_grid]]) { x[i] += y; }"
    )
    encoder.setComputePipelineState_(pipeline(source, "add"))
    encoder.setBuffer_offset_atIndex_(x, 64, 0)
    encoder.setBytes_length_atIndex_(np.float32(2).tobytes(), 4, 1)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_((1, 1, 1), (16, 1, 1))
    encoder.endEncoding()
    recording = commands.record(command_buffer, [[(0, 0)]], [x])
    for buffer in (x, y, y):
        recording.run([buffer])
    results = [np.frombuffer(buffer.contents().as_buffer(128), np.float32) for buffer in (x, y)]
    for result, expected in zip(results, (2, 4), strict=True):
        np.testing.assert_array_equal(result, np.repeat(np.array([0, expected], np.float32), 16))
    longer = device("fast").newBufferWithLength_options_(256, 0)
    assert not recording.takes([longer])
    with pytest.raises(DeviceError, match="other lengths"):
        recording.run([longer])
    with pytest.raises(DeviceError, match="committed already"):
        command_buffer.commit()
    alive = weakref.ref(x)
    del x, buffer, encoder, command_buffer, results, result
    gc.collect()
    assert alive() is None
