"""Kernels of CUDA on this machine's processor: their text as C++, threads as fibers, instructions by what they mean.

It is for small problems: what a kernel computes, where it reads, and that no thread waits for ever. Only what the files
named here declare by instructions is translated; a kernel that has others does not compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuda_compiler.artifact.extensions import cluster_of, map_of
from npu_compiler.artifact.plan import Argument, ExecutionPlan, KernelCall, Role

__all__ = ["HAS_COMPILER", "keep_compiled_in", "run_on_host", "run_plan_on_host"]

HAS_COMPILER = shutil.which("g++") is not None
_HEADER, _THREADS = (Path(__file__).with_name(name) for name in ("host_kernels.h", "host_threads.cpp"))
_COMMAND = ("g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-pthread")
_compiled: Path | None = None  # a folder for all that the session compiles
_FUNCTION = r"__device__ (?:__forceinline__ )?[\w ]*\b{}\((?:[^()]|\([^()]*\))*\)\n\{{\n.*?\n\}}\n"
_ONE_LINE = re.compile(r"\{ asm volatile\([^{}]*\); \}")
_STATEMENTS = {
    r'asm\("cvt\.rn\.f16\.f32 .*?;"[^;]*;': "bits = host_half(value);",
    r'asm\("cvt\.f32\.f16 .*?;"[^;]*;': "value = host_float(bits);",
    r'asm\("cvt\.rn\.bf16\.f32 .*?;"[^;]*;': "bits = host_bfloat(value);",
    r'asm\("mov\.b32 %0, \{0, %1\};"[^;]*;': "value = __uint_as_float(unsigned(bits) << 16);",
    r'asm\("rcp\.approx\.ftz\.f32 .*?;"[^;]*;': "reciprocal = 1.0f / divisor;",
    r'asm\("ex2\.approx\.ftz\.f32 .*?;"[^;]*;': "power = exp2f(exponent);",
    r'asm\("sub\.f16x2 .*?;"[^;]*;': "result = pairwise(b, 0xbc00bc00u, a, true);",
    r'asm\("mul\.f16x2 .*?;"[^;]*;': "result = pairwise(a, b, 0x80008000u, true);",
    r'asm\("fma\.rn\.f16x2 .*?;"[^;]*;': "result = pairwise(a, b, c, true);",
    r'asm\("fma\.rn\.bf16x2 .*?;"[^;]*;': "result = pairwise(a, b, c, false);",
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\..*?\);\n': "host_multiply(sum, a, b0, b1, true);\n",
    r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\..*?\);\n': "host_multiply(sum, a, b0, b1, false);\n",
    r'#define MULTIPLY_CODES\(left\).*?"r"\(b1\)\)\n': (
        "#define MULTIPLY_CODES(left) host_multiply_codes(at, a, b0, b1, left)\n"
    ),
    r'#define MULTIPLY_EIGHT\(left\).*?"r"\(b\)\)\n': "#define MULTIPLY_EIGHT(left) abort()\n",
    r"#if defined\(__CUDA_ARCH_FEAT_SM90_ALL\)\n[^#]*?wgmma[^#]*?k16\.f32\.f16\.f16[^#]*adds, 1, 1, 1;[^#]*#endif": (
        "host_wgmma(sum, a, b, adds, true, true);"
    ),
    r"#if defined\(__CUDA_ARCH_FEAT_SM90_ALL\)\n[^#]*?wgmma[^#]*?k16\.f32\.bf16\.bf16[^#]*adds, 1, 1, 1;[^#]*#endif": (
        "host_wgmma(sum, a, b, adds, false, true);"
    ),
    r"#if defined\(__CUDA_ARCH_FEAT_SM90_ALL\)\n[^#]*?wgmma[^#]*?k16\.f32\.f16\.f16[^#]*#endif": (
        "host_wgmma(sum, a, b, adds, true);"
    ),
    r"#if defined\(__CUDA_ARCH_FEAT_SM90_ALL\)\n[^#]*?wgmma[^#]*?k16\.f32\.bf16\.bf16[^#]*#endif": (
        "host_wgmma(sum, a, b, adds, false);"
    ),
    r'asm\("max\.u16x2 .*?;"[^;]*;': (
        "sizes = max(sizes & 0xffffu, pair & 0xffffu) | max(sizes & 0xffff0000u, pair & 0xffff0000u);"
    ),
    r'asm\("max\.NaN\.f32 .*?;"[^;]*;': "result = a > b || a != a ? a : b;",
    r'asm\("min\.NaN\.f32 .*?;"[^;]*;': "result = a < b || a != a ? a : b;",
    r'asm\("lop3\.b32 .*?;"[^;]*;': "result = a & mask | b;",
}
_FUNCTIONS = {
    "wait_for_previous_grid": "inline void wait_for_previous_grid() {}\n",
    "hurry_next_grid": "inline void hurry_next_grid() {}\n",
    "count_arrival": "inline uint count_arrival(uint& counter, uint last) { return atomicInc(&counter, last); }\n",
    "commit_copies": "inline void commit_copies() {}\n",
    "wait_for_copies": "inline void wait_for_copies() {}\n",
    "copy_chunk_to": (
        "inline void copy_chunk_to(uint target, const void* source, bool valid)\n{\n"
        "    memset(host_shared() + target, 0, 16);\n"
        "    host_load<16>((unsigned*)(host_shared() + target), source, valid);\n}\n"
    ),
    "copy_chunk": (
        "inline void copy_chunk(void* target, const void* source, bool valid)\n{\n"
        "    memset(target, 0, 16);\n    host_load<16>((unsigned*)target, source, valid);\n}\n"
    ),
    "load_matrices": (
        "inline void load_matrices(uint (&matrix)[4], uint row)\n{\n    host_load_matrices(matrix, row);\n}\n"
    ),
    "load_matrices_transposed": (
        "inline void load_matrices_transposed(uint (&matrix)[4], uint row)\n{\n    host_load_matrices(matrix, row);\n"
        "    for (uint& each : matrix) { each = host_transposed(each); }\n}\n"
    ),
    "copy_part": (
        "inline void copy_part(void* target, const void* source, int bytes)\n{\n"
        "    host_copy_part(target, source, bytes, BYTES);\n}\n"
    ),
    "load_bits": (
        "inline void load_bits(uint* word, const uint8* source, bool valid)\n{\n"
        "    host_load<BYTES>(word, source, valid);\n}\n"
    ),
    "load_element": (
        "inline void load_element(uint& bits, const T* source, bool valid)\n{\n"
        "    bits = valid && sizeof(T) == 2 ? 0 : bits;\n    host_load<sizeof(T)>(&bits, source, valid);\n}\n"
    ),
    "float8_e4m3_code": "inline int float8_e4m3_code(float number) { return host_float8_e4m3(number); }\n",
    "float8_e4m3_pair": (
        "inline uint float8_e4m3_pair(float first, float second)\n{\n"
        "    return uint(host_float8_e4m3(first)) | uint(host_float8_e4m3(second)) << 8;\n}\n"
    ),
    "transposed": "inline uint transposed(uint matrix) { return host_transposed(matrix); }\n",
    "make_barrier": "inline void make_barrier(uint barrier, int count) { host_make_barrier(barrier, count); }\n",
    "publish_barriers": "inline void publish_barriers() {}\n",
    "arrive": "inline void arrive(uint barrier) { host_arrive(barrier, 0); }\n",
    "arrive_with_copies": "inline void arrive_with_copies(uint barrier) { host_arrive(barrier, 0); }\n",
    "arrive_at": (
        "inline void arrive_at(int number, int threads)\n{\n    count_in(current->own->named[number], threads);\n}\n"
    ),
    "arrive_and_expect": "inline void arrive_and_expect(uint barrier, int bytes) { host_arrive(barrier, bytes); }\n",
    "wait_for_phase": "inline void wait_for_phase(uint barrier, int parity) { host_wait(barrier, parity); }\n",
    "ask_for": "inline void ask_for(const void* source) { (void)*(const volatile char*)source; }\n",
    "prefetch_map": "inline void prefetch_map(const TensorMap&) {}\n",
    "copy_lines": (
        "inline void copy_lines(uint target, const TensorMap& map, uint barrier, int k, int line)\n{\n"
        "    host_copy_box(target, &map, barrier, {k, line, 0, 0, 0});\n}\n"
    ),
    "copy_panel": (
        "inline void copy_panel(\n    uint target, const TensorMap& map, uint barrier, int element, int line, "
        "int layer, int outer)\n{\n    host_copy_box(target, &map, barrier, {element, line, layer, outer, 0});\n}\n"
    ),
    "copy_groups": (
        "inline void copy_groups(uint target, const TensorMap& map, uint barrier, int k, int group)\n{\n"
        "    host_copy_box(target, &map, barrier, {k, 0, 0, 0, group});\n}\n"
    ),
    "store_lines": (
        "inline void store_lines(const TensorMap& map, uint source, int k, int line)\n{\n"
        "    host_store_box(source, &map, k, line);\n}\n"
    ),
    "wait_for_reading": "inline void wait_for_reading() {}\n",
    "wait_for_storing": "inline void wait_for_storing() {}\n",
    "allow_registers": "inline void allow_registers() {}\n",
    "leave_registers": "inline void leave_registers() {}\n",
    "announce_to_cluster": "inline void announce_to_cluster() { arrive_in_cluster(); }\n",
    "arrive_at_cluster": "inline void arrive_at_cluster() { arrive_in_cluster(); }\n",
    "shared_address": "inline uint shared_address(const void* pointer) { return host_shared_address(pointer); }\n",
    "wait_for_products": "inline void wait_for_products() {}\n",
    "synchronize": (
        "inline void synchronize(int number, int threads)\n{\n    meet(current->own->named[number], threads);\n}\n"
    ),
    "store_matrices": (
        "inline void store_matrices(uint address, const uint (&word)[4])\n"
        "{\n    host_store_matrices(address, word);\n}\n"
    ),
    "greater_pair": (
        "inline uint greater_pair(uint a, uint b)\n{\n    return host_greater_pair(a, b, GREATER_PAIR);\n}\n"
    ),
    "wait_for_cluster": "inline void wait_for_cluster() { wait_in_cluster(); }\n",
    "synchronize_cluster": "inline void synchronize_cluster() { arrive_in_cluster(), wait_in_cluster(); }\n",
    "leave_cluster": "inline void leave_cluster() { arrive_in_cluster(), wait_in_cluster(); }\n",
    "store_shared": (
        "inline void store_shared(uint address, const float (&value)[4])\n{\n"
        "    memcpy(host_shared() + address, value, 16);\n}\n"
    ),
    "load_from_cluster": (
        "inline float4 load_from_cluster(uint address, int rank)\n{\n    float4 value;\n"
        "    memcpy(&value, host_shared(cluster_blocks[rank]) + address, 16);\n    return value;\n}\n"
    ),
}
_ALONG_Y = "__cluster_dims__(1, SPLITS, 1)"  # the clusters that a kernel declares by itself
_OVERLOADED = {  # for values of several types: one for all takes the place of the first
    "store_in_cluster": (
        "template <typename T>\ninline void store_in_cluster(const void* target, int rank, T value)\n{\n"
        "    host_store_in_cluster(target, rank, value);\n}\n"
    ),
    "send_to_cluster": (
        "template <typename T>\n"
        "inline void send_to_cluster(const void* target, int rank, T value, const uint64* barrier)\n{\n"
        "    host_store_in_cluster(target, rank, value);\n"
        "    host_count_bytes(shared_address(barrier), rank, sizeof(T));\n}\n"
    ),
}
_ASM = re.compile(r"^[ ]*asm volatile\(.*?;\n", re.S | re.M)


def keep_compiled_in(folder: Path) -> None:
    """Names the folder in which the processes of a session have what one of them compiled."""
    global _compiled
    folder.mkdir(exist_ok=True)
    _compiled = folder


def _made(target: Path, *options: str) -> Path:
    """What the compiler makes of the options; other processes see the whole of it, or nothing."""
    if not target.exists():
        own = target.with_name(f"{os.getpid()}.{target.name}")
        subprocess.run([*_COMMAND, *options, "-o", str(own)], check=True, capture_output=True, text=True)
        own.replace(target)
    return target


def _library(text: str, folder: Path) -> Path:
    """A kernel's text, as `_translated` gives it, compiled."""
    place = _compiled or folder
    library = place / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if library.exists():
        return library
    threads = _made(place / "threads.o", "-c", str(_THREADS))
    header = _made(place / f"{_HEADER.name}.gch", "-x", "c++-header", str(_HEADER))
    source = folder / "kernel.cpp"
    source.write_text(text)
    # Included by its name, the header is read as it was compiled: otherwise that takes a third of a kernel's time.
    return _made(library, "-shared", "-include", str(header.with_suffix("")), str(source), str(threads))


def run_on_host(
    plan: ExecutionPlan, call: KernelCall, tensors: dict[str, NDArray[np.uint8]], folder: Path, backwards: bool = False
) -> NDArray[np.uint8]:
    """The bytes of a plan's output after one launch.

    Args:
        plan: The plan.
        call: The launch.
        tensors: The bytes of inputs and weights by name.
        folder: Where the kernel is compiled, unless the session has a place for that.
        backwards: Whether the last thread is the first to go on behind a barrier: one that is missing shows in one
            order or the other.
    """
    buffers = _memory(plan, tensors)
    _launch(plan, call, buffers, folder, backwards)
    (written,) = {argument.buffer for argument in call.args if argument.writes}
    return buffers[written][: plan.buffers[written].nbytes]


def run_plan_on_host(
    plan: ExecutionPlan, tensors: dict[str, NDArray[np.uint8]], folder: Path, backwards: bool = False
) -> dict[str, NDArray[np.uint8]]:
    """The bytes of a plan's named buffers after all of its launches; those that it updates in place included.

    Args:
        plan: The plan, without choices.
        tensors: As in `run_on_host`.
        folder: As in `run_on_host`.
        backwards: As in `run_on_host`.
    """
    buffers = _memory(plan, tensors)
    for buffer, array in zip(plan.buffers, buffers, strict=True):
        if buffer.role is Role.FAULTS:
            array[:] = 0
    for call in plan.calls:
        assert isinstance(call, KernelCall)
        _launch(plan, call, buffers, folder, backwards)
    named = zip(plan.buffers, buffers, strict=True)
    return {buffer.name or buffer.role.value: array[: buffer.nbytes] for buffer, array in named}


def _memory(plan: ExecutionPlan, tensors: dict[str, NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """A plan's buffers, with what they hold at first."""
    buffers = [np.full(buffer.nbytes + 16, 0xFF, np.uint8) for buffer in plan.buffers]
    buffers = [array[-array.ctypes.data % 16 :] for array in buffers]
    for buffer, array in zip(plan.buffers, buffers, strict=True):
        if buffer.name in tensors:
            given = tensors[buffer.name].reshape(-1)
            array[: given.size] = given
    return buffers


def _launch(
    plan: ExecutionPlan, call: KernelCall, buffers: Sequence[NDArray[np.uint8]], folder: Path, backwards: bool = False
) -> None:
    kernel = plan.kernels[call.kernel]
    library = _library(_translated(kernel.text, kernel.entry, call.args), folder)
    parameters = np.frombuffer(call.params, np.uint8).copy()
    maps = [_host_map(argument, buffers[argument.buffer]) for argument in call.args]
    addresses = [
        ctypes.addressof(made) if made else buffers[argument.buffer].ctypes.data + argument.offset
        for argument, made in zip(call.args, maps, strict=True)
    ]
    pointers = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, parameters.ctypes.data)
    declared = re.search(r"^#define SPLITS (\d+)$", kernel.text, re.M) if _ALONG_Y in kernel.text else None
    cluster = cluster_of(call)[0], int(declared[1]) if declared else 1
    sizes: Sequence[int] = (*call.grid, call.block[0], *cluster, call.shared_bytes, backwards)
    if ctypes.CDLL(str(library)).run(pointers, *sizes):
        raise RuntimeError(f"the kernel '{kernel.entry}' waits for ever")


class _HostMap(ctypes.Structure):
    """What a kernel has of a tensor map here."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("sizes", ctypes.c_long * 5),
        ("strides", ctypes.c_long * 5),
        ("box", ctypes.c_int * 5),
        ("rest", ctypes.c_char * 128),  # to the size of a map
    )


def _host_map(argument: Argument, buffer: NDArray[np.uint8]) -> _HostMap | None:
    """A map, of axes of one element beyond its own; None for an argument that is an address."""
    tensor = map_of(argument)
    if tensor is None:
        return None
    more = [1] * (5 - len(tensor.sizes))
    sizes, box = (ctypes.c_long * 5)(*tensor.sizes, *more), (ctypes.c_int * 5)(*tensor.box, *more)
    return _HostMap(buffer.ctypes.data + argument.offset, sizes, (ctypes.c_long * 5)(2, *tensor.strides), box)


def _translated(text: str, entry: str, arguments: Sequence[Argument]) -> str:
    """The kernel as C++ of a processor."""
    for pattern, statement in _STATEMENTS.items():
        text = re.sub(pattern, statement, text, flags=re.S)
    for name, function in _FUNCTIONS.items():
        text = re.sub(_FUNCTION.format(name), function.replace("\\", "\\\\"), text, flags=re.S)
    for name, function in _OVERLOADED.items():
        overload = re.compile(_FUNCTION.format(name), re.S)
        text = overload.sub("", overload.sub(function, text, count=1))
    text = _ONE_LINE.sub("{}", text)
    text = _ASM.sub("    abort();\n", text)
    text = re.sub(r'asm\((?:[^;"]|"[^"]*")*;', "abort();", text)
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];", r"unsigned char* \1 = host_shared();", text
    )
    text = text.replace('extern "C" __global__ void', "void")
    passed = ", ".join(
        f"*(const TensorMap*)bound[{number}]"
        if map_of(argument)
        else f"(decltype(pointer_of<{number}>({entry})))bound[{number}]"
        for number, argument in enumerate(arguments)
    )
    pick = (
        "template <int N, typename... Types> struct Pick;\n"
        "template <int N, typename First, typename... Rest> struct Pick<N, First, Rest...> : Pick<N - 1, Rest...> {};\n"
        "template <typename First, typename... Rest> struct Pick<0, First, Rest...> { typedef First type; };\n"
        "template <int N, typename... Types> typename Pick<N, Types...>::type pointer_of(void (*)(Types...));\n"
    )
    calling = f"void call_kernel(void** bound) {{ {entry}({passed}, *(const Params*)bound[{len(arguments)}]); }}\n"
    return text + "\n" + pick + calling
