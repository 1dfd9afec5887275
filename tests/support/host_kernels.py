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
_HEADER = Path(__file__).with_name("host_kernels.h")
_COMMAND = ("g++", "-std=c++17", "-O1", "-w", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
_compiled: Path | None = None  # a folder with the header as the compiler keeps it, and what the session has compiled
_FUNCTION = r"__device__ (?:__forceinline__ )?[\w ]*\b{}\((?:[^()]|\([^()]*\))*\)\n\{{\n.*?\n\}}\n"
_ONE_LINE = re.compile(r"\{ asm volatile\([^{}]*\); \}")
_STATEMENTS = {
    r'asm\("cvt\.rn\.f16\.f32 .*?;"[^;]*;': "bits = host_half(value);",
    r'asm\("cvt\.f32\.f16 .*?;"[^;]*;': "value = host_float(bits);",
    r'asm\("cvt\.rn\.bf16\.f32 .*?;"[^;]*;': "bits = host_bfloat(value);",
    r'asm\("rcp\.approx\.ftz\.f32 .*?;"[^;]*;': "reciprocal = 1.0f / divisor;",
    r'asm\("ex2\.approx\.ftz\.f32 .*?;"[^;]*;': "power = exp2f(exponent);",
    r'asm\("sub\.f16x2 .*?;"[^;]*;': "result = pairwise(b, 0xbc00bc00u, a, true);",
    r'asm\("mul\.f16x2 .*?;"[^;]*;': "result = pairwise(a, b, 0x80008000u, true);",
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
    "make_barrier": (
        "inline void make_barrier(uint barrier, int count)\n{\n"
        "    current->own->phases[barrier] = {count, count, 0, 0};\n}\n"
    ),
    "publish_barriers": "inline void publish_barriers() {}\n",
    "arrive": "inline void arrive(uint barrier) { host_arrive(barrier, 0); }\n",
    "arrive_with_copies": "inline void arrive_with_copies(uint barrier) { host_arrive(barrier, 0); }\n",
    "arrive_at": (
        "inline void arrive_at(int number, int threads)\n{\n    count_in(current->own->named[number], threads);\n}\n"
    ),
    "arrive_and_expect": "inline void arrive_and_expect(uint barrier, int bytes) { host_arrive(barrier, bytes); }\n",
    "wait_for_phase": (
        "inline void wait_for_phase(uint barrier, int parity)\n{\n"
        "    while (current->own->phases.at(barrier).phase % 2 == parity) { yield(); }\n}\n"
    ),
    "prefetch_map": "inline void prefetch_map(const TensorMap&) {}\n",
    "copy_lines": (
        "inline void copy_lines(uint target, const TensorMap& map, uint barrier, int k, int line)\n{\n"
        "    host_copy_box(target, &map, barrier, {k, line, 0, 0, 0});\n}\n"
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
_ASM = re.compile(r"^[ ]*asm volatile\(.*?;\n", re.S | re.M)
_RUN = r"""
constexpr size_t STACK_BYTES = 1 << 14; // kernels take less than 3 KB
static void** bound;
static void call_kernel();
static void enter()
{
    call_kernel();
    current->finished = true;
    _longjmp(scheduler, 1);
}
static int run_cluster(Dim first, Dim cluster, int block, int shared)
{
    int count = cluster.x * cluster.y;
    cluster_barrier = Barrier();
    std::vector<Block> blocks(count);
    std::vector<Warp> warps(count * block / 32);
    std::vector<Fiber> fibers(count * block);
    static std::vector<char> stacks; // kept: new pages take the system longer than the kernel runs
    stacks.assign(fibers.size() * STACK_BYTES, char(0xff));
    cluster_blocks.clear();
    for (Block& each : blocks) {
        each.shared.assign(shared + 1024, 0xff);
        cluster_blocks.push_back(&each);
    }
    for (int number = 0; number < count * block; ++number) {
        Fiber& fiber = fibers[number];
        int rank = number / block;
        fiber.thread = {number % block, 0, 0};
        fiber.block = {first.x + rank % cluster.x, first.y + rank / cluster.x, first.z};
        fiber.own = &blocks[rank];
        fiber.warp = &warps[number / 32];
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = &stacks[number * STACK_BYTES];
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.start, enter, 0);
    }
    for (long turns = 0, left = 1; left > 0; ++turns) {
        left = 0;
        for (Fiber& fiber : fibers) {
            if (!fiber.finished) {
                ++left;
                resume(fiber);
            }
        }
        if (turns > 10000000) {
            return 1;
        }
    }
    for (size_t number = 0; number < fibers.size(); ++number) {
        if (stacks[number * STACK_BYTES] != char(0xff)) {
            fprintf(stderr, "a thread needs more than %zu bytes of stack\n", STACK_BYTES);
            abort();
        }
    }
    return 0;
}
extern "C" int run(void** pointers, int x, int y, int z, int block, int cluster_x, int cluster_y, int shared)
{
    bound = pointers;
    grid_size = {x, y, z};
    block_threads = block;
    cluster_threads = block * cluster_x * cluster_y;
    int failed = 0;
    for (Dim first = {0, 0, 0}; first.z < z; ++first.z) {
        for (first.y = 0; first.y < y; first.y += cluster_y) {
            for (first.x = 0; first.x < x && !failed; first.x += cluster_x) {
                failed = run_cluster(first, {cluster_x, cluster_y, 1}, block, shared);
            }
        }
    }
    return failed;
}
"""


def keep_compiled_in(folder: Path) -> None:
    """Names the folder in which the processes of a session have the header and kernels, each compiled by the first."""
    global _compiled
    folder.mkdir(exist_ok=True)
    _compiled = folder


def _header_options() -> list[str]:
    """What includes the header: reading it takes a third of the time that a kernel does."""
    if _compiled is None:
        return ["-include", str(_HEADER)]
    copy = _compiled / _HEADER.name
    compiled = copy.with_name(f"{copy.name}.gch")
    if not compiled.exists():
        shutil.copy(_HEADER, copy)
        own = _compiled / f"{os.getpid()}.gch"
        command = [*_COMMAND, "-x", "c++-header", "-o", str(own), str(copy)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        own.replace(compiled)
    return ["-include", str(copy)]


def _library(text: str, folder: Path) -> Path:
    """A kernel's text, as `_translated` gives it, compiled."""
    place = _compiled or folder
    library = place / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not library.exists():
        source, own = folder / f"{library.stem}.cpp", place / f"{library.stem}.{os.getpid()}"
        source.write_text(text)
        command = [*_COMMAND, "-shared", *_header_options(), "-o", str(own), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        own.replace(library)
    return library


def run_on_host(
    plan: ExecutionPlan, call: KernelCall, tensors: dict[str, NDArray[np.uint8]], folder: Path
) -> NDArray[np.uint8]:
    """The bytes of a plan's output after one launch.

    Args:
        plan: The plan.
        call: The launch.
        tensors: The bytes of inputs and weights by name.
        folder: Where the kernel is compiled, unless the session has a place for that.
    """
    buffers = _memory(plan, tensors)
    _launch(plan, call, buffers, folder)
    (written,) = {argument.buffer for argument in call.args if argument.writes}
    return buffers[written][: plan.buffers[written].nbytes]


def run_plan_on_host(
    plan: ExecutionPlan, tensors: dict[str, NDArray[np.uint8]], folder: Path
) -> dict[str, NDArray[np.uint8]]:
    """The bytes of a plan's named buffers after all of its launches; those that it updates in place included.

    Args:
        plan: The plan, without choices.
        tensors: As in `run_on_host`.
        folder: As in `run_on_host`.
    """
    buffers = _memory(plan, tensors)
    for buffer, array in zip(plan.buffers, buffers, strict=True):
        if buffer.role is Role.FAULTS:
            array[:] = 0
    for call in plan.calls:
        assert isinstance(call, KernelCall)
        _launch(plan, call, buffers, folder)
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


def _launch(plan: ExecutionPlan, call: KernelCall, buffers: Sequence[NDArray[np.uint8]], folder: Path) -> None:
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
    sizes: Sequence[int] = (*call.grid, call.block[0], *cluster, call.shared_bytes)
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
    text = re.sub(
        r"inline void store_in_cluster\(.*?float value\)\n\{.*?\n\}\n",
        "inline void store_in_cluster(const void* target, int rank, float value) "
        "{ store_word_in_cluster(target, rank, value); }\n",
        text.replace("__device__ __forceinline__ void store_in_cluster", "inline void store_in_cluster"),
        count=1,
        flags=re.S,
    )
    text = re.sub(
        r"inline void store_in_cluster\([^)]*float4 value\)\n\{.*?\n\}\n",
        "inline void store_in_cluster(const void* target, int rank, float4 value) "
        "{ store_words_in_cluster(target, rank, value); }\n",
        text,
        count=1,
        flags=re.S,
    )
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
    calling = f"static void call_kernel() {{ {entry}({passed}, *(const Params*)bound[{len(arguments)}]); }}\n"
    return text + "\n" + pick + _RUN + calling
