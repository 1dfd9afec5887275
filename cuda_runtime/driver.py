"""The few calls of CUDA's driver that load and launch kernels, bound by ctypes; memory and streams are CuPy's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from threading import local

from cuda_compiler.artifact.extensions import TensorMap
from npu_compiler.errors import DeviceError, OutOfMemoryError
from npu_compiler.integers import ceil_div

__all__ = ["Kernel", "Module", "encoded_map", "record_event"]

_OUT_OF_MEMORY = 2
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT, _ALL_SHARED = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in per cent
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_RECORD_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_TYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # by bytes of a line: CU_TENSOR_MAP_SWIZZLE_...
_MOST_PARAMETER_BYTES, _ALIGNMENT = 32768, 16  # what no kernel's parameters exceed on any device
_NO_INTERLEAVE, _PROMOTION_256, _ZEROS_OUTSIDE = 0, 3, 0  # CU_TENSOR_MAP_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Module:
    """Machine code loaded into the current context."""

    def __init__(self, code: bytes) -> None:
        self._handle = ctypes.c_void_p()
        _check(_library().cuModuleLoadData(ctypes.byref(self._handle), code), "loading a kernel")

    def kernel(self, entry: str, shared_bytes: int, beside: bool = False) -> Kernel:
        """The kernel of a name, allowed to share `shared_bytes` among the threads of a block.

        Where its blocks are `beside` those of others, a multiprocessor has as much shared memory as it can.
        """
        function = ctypes.c_void_p()
        _check(_library().cuModuleGetFunction(ctypes.byref(function), self._handle, entry.encode()), f"'{entry}'")
        if shared_bytes:
            status = _library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
            _check(status, f"'{entry}' with {shared_bytes} bytes of shared memory")
        if beside:
            _check(_library().cuFuncSetAttribute(function, _SHARED_CARVEOUT, _ALL_SHARED), f"'{entry}' beside others")
        return Kernel(self, function, entry)


class Kernel:
    """A kernel that can be launched."""

    def __init__(self, module: Module, function: ctypes.c_void_p, entry: str) -> None:
        self._module, self._function, self._entry = module, function, entry

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        shared_bytes: int,
        values: Sequence[int | bytes],
        params: bytes,
        stream: int,
        overlapping: bool,
    ) -> None:
        """Launches the kernel on a stream.

        Args:
            grid, block: Blocks of the grid, threads of a block.
            cluster: Blocks of a cluster; from compute capability 9.0 on it may be more than one.
            shared_bytes: Dynamic shared memory of a block.
            values: What it takes: addresses, and tensor maps as `encoded_map` gives them.
            params: Its last parameter, a struct; empty where it has none.
            stream: Handle of the stream.
            overlapping: Whether it may start before the kernel ahead of it has finished; it then waits by itself.

        Raises:
            DeviceError: The driver refused the launch.
        """
        parameters = _parameters.holding((*values, params) if params else values, self._entry)
        attributes = []
        if cluster != (1, 1, 1):
            attributes.append(_Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_int * 16)(*cluster)))
        if overlapping:
            attributes.append(_Attribute(_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1)))
        config = _Config(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_bytes,
            ctypes.c_void_p(stream),
            (_Attribute * len(attributes))(*attributes),
            len(attributes),
        )
        status = _library().cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None)
        _check(status, f"launching '{self._entry}'")


class _Parameters(local):
    """Memory of each thread for what a launch gives its kernel.

    The driver reads as many parameters, and as many bytes of each, as the kernel's text declares, which a file may have
    to differ from what its launch gives. There is room for all that a kernel may take, and what is not given is zeros.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(2 * _MOST_PARAMETER_BYTES)  # the second half stays zeros
        self._base = ctypes.addressof(self._memory)
        self._nothing = self._base + _MOST_PARAMETER_BYTES
        self._places = (ctypes.c_void_p * _MOST_PARAMETER_BYTES)(*[self._nothing] * _MOST_PARAMETER_BYTES)
        self._used = self._count = 0

    def holding(self, values: Sequence[int | bytes], entry: str) -> ctypes.Array[ctypes.c_void_p]:
        """The places of parameters, until other ones are asked for: addresses of 8 bytes, and what is bytes already.

        Raises:
            DeviceError: They are more than any kernel takes; `entry` is the kernel's name.
        """
        given = [_aligned(value.to_bytes(8, "little") if isinstance(value, int) else value) for value in values]
        *places, end = accumulate(map(len, given), initial=self._base)
        used = end - self._base
        if used > _MOST_PARAMETER_BYTES:
            raise DeviceError(
                f"'{entry}' is given {used} bytes of parameters, expected at most {_MOST_PARAMETER_BYTES}; "
                "compile the model again"
            )
        content = b"".join(given).ljust(self._used, b"\0")
        ctypes.memmove(self._base, content, len(content))
        self._places[: max(len(places), self._count)] = [*places, *[self._nothing] * (self._count - len(places))]
        self._used, self._count = used, len(places)
        return self._places


def _aligned(parameter: bytes) -> bytes:
    return parameter.ljust(ceil_div(len(parameter), _ALIGNMENT) * _ALIGNMENT, b"\0")


_parameters = _Parameters()


@lru_cache(maxsize=4096)  # as many as a few plans bind
def encoded_map(tensor: TensorMap, address: int) -> bytes:
    """A tensor map for a tensor at an address, as kernels take it.

    Raises:
        DeviceError: The driver refused it.
    """
    rank = len(tensor.sizes)
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + start),
        _MAP_TYPES[tensor.dtype.name],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor.sizes),
        (ctypes.c_uint64 * (rank - 1))(*tensor.strides),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
        _NO_INTERLEAVE,
        _SWIZZLES[tensor.line_bytes],
        _PROMOTION_256,
        _ZEROS_OUTSIDE,
    )
    _check(status, f"a map of a tensor of {' x '.join(map(str, tensor.sizes))}")
    return memory.raw[start : start + _MAP_BYTES]


def record_event(event: int, stream: int) -> None:
    """Asks a stream that is being captured to note the time in each run of the graph; takes their handles.

    Raises:
        DeviceError: The driver refused it.
    """
    handles = ctypes.c_void_p(event), ctypes.c_void_p(stream)
    _check(_library().cuEventRecordWithFlags(*handles, _RECORD_EXTERNAL), "recording an event")


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    _library().cuGetErrorName(status, ctypes.byref(name))
    _library().cuGetErrorString(status, ctypes.byref(text))
    kind = OutOfMemoryError if status == _OUT_OF_MEMORY else DeviceError
    said = f"{(name.value or b'error').decode()}: {(text.value or b'').decode()}"
    raise kind(f"CUDA refused {what} ({said}); compile the model with this release, and see `npu doctor`")


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"this machine has no NVIDIA driver ({error}); install one, or use Device('software-metal')"
        ) from error
