"""Writes the C++ functions through which a compiled library's kernels are called.

A kernel without synchronisation is inlined in a loop over a row of threads. One with barriers or collectives runs on
fibers, and in region form where `regions` can give it one.

Names in the text: msl_x msl_y msl_z is the thread's place in its threadgroup and msl_index its index, msl_gx msl_gy
msl_gz the group's place in the grid and msl_nx msl_ny msl_nz its extent, msl_d the dispatch.
"""

from __future__ import annotations

from software_gpu.msl_parser import BUILTINS, Kernel, Parameter

__all__ = [
    "argument_table",
    "builtin_value",
    "entry_signature",
    "fiber_entry",
    "group_loop",
    "loop_entry",
    "shared_arguments",
]

_SIMDGROUPS = "(msl_nx * msl_ny * msl_nz + 31) / 32"
_BUILTIN_VALUES = {
    "thread_position_in_grid": (
        "msl_gx * msl_d.threads[0] + msl_x",
        "msl_gy * msl_d.threads[1] + msl_y",
        "msl_gz * msl_d.threads[2] + msl_z",
    ),
    "thread_position_in_threadgroup": ("msl_x", "msl_y", "msl_z"),
    "thread_index_in_threadgroup": ("msl_index", "0", "0"),
    "thread_index_in_simdgroup": ("msl_index % 32", "0", "0"),
    "thread_index_in_quadgroup": ("msl_index % 4", "0", "0"),
    "quadgroup_index_in_threadgroup": ("msl_index / 4", "0", "0"),
    "simdgroup_index_in_threadgroup": ("msl_index / 32", "0", "0"),
    "simdgroups_per_threadgroup": (_SIMDGROUPS, "0", "0"),
    "dispatch_simdgroups_per_threadgroup": (
        "(msl_d.threads[0] * msl_d.threads[1] * msl_d.threads[2] + 31) / 32",
        "0",
        "0",
    ),
    "threadgroup_position_in_grid": ("msl_gx", "msl_gy", "msl_gz"),
    "threadgroups_per_grid": ("msl_d.groups[0]", "msl_d.groups[1]", "msl_d.groups[2]"),
    "threads_per_grid": ("msl_d.grid[0]", "msl_d.grid[1]", "msl_d.grid[2]"),
    "threads_per_threadgroup": ("msl_nx", "msl_ny", "msl_nz"),
    "dispatch_threads_per_threadgroup": ("msl_d.threads[0]", "msl_d.threads[1]", "msl_d.threads[2]"),
    "threads_per_simdgroup": ("32", "1", "1"),
    "thread_execution_width": ("32", "1", "1"),
}
# What a kernel may ask and still be indifferent to where one threadgroup ends and the next begins.
_GROUP_FREE = frozenset({"thread_position_in_grid", "threads_per_grid", "buffer"})


def builtin_value(parameter: Parameter) -> str:
    """The C++ expression of a parameter that the GPU fills in."""
    x, y, z = _BUILTIN_VALUES[parameter.role]
    return f"msl::position<{parameter.type}>({x}, {y}, {z})"


def shared_arguments(kernel: Kernel) -> str:
    """Declarations of the arguments that all threads share, by the kernel's own names.

    Structs in constant memory are copied: clang can't know that no store of the kernel changes them.
    """
    declarations = []
    for parameter in kernel.parameters:
        if parameter.role == "buffer":
            address = f"msl_d.buffers[{parameter.index}]"
        elif parameter.role == "threadgroup":
            address = f"msl::threadgroup_memory(msl_d.threadgroup_offsets[{parameter.index}])"
        else:
            continue
        if not parameter.is_reference:
            declarations.append(f"{parameter.type} const {parameter.name} = ({parameter.type}){address};")
            continue
        kind = parameter.type.removesuffix("&")
        reference = "" if parameter.space == "constant" else "&"
        declarations.append(f"{kind}{reference} {parameter.name} = *({kind}*){address};")
    return "\n  ".join(declarations)


def _call(kernel: Kernel) -> str:
    values = [builtin_value(p) if p.role in BUILTINS else p.name for p in kernel.parameters]
    return f"::{kernel.name}({', '.join(values)});"


def entry_signature(form: str, kernel: Kernel) -> str:
    """Head of the entry of one form of a kernel."""
    return (
        f'extern "C" MSL_EXPORT MSL_UNCHECKED void msl_{form}_{kernel.name}'
        "(msl::Worker* msl_w, const msl::Dispatch* msl_dispatch, ulong msl_first, ulong msl_last)"
    )


_GROUP_POSITION = (
    "const uint msl_gx = msl_g % msl_d.groups[0], msl_gy = msl_g / msl_d.groups[0] % msl_d.groups[1], "
    "msl_gz = msl_g / msl_d.groups[0] / msl_d.groups[1];"
)
_GROUP_EXTENT = (
    "const uint msl_nx = msl::extent(msl_d, 0, msl_gx), msl_ny = msl::extent(msl_d, 1, msl_gy), "
    "msl_nz = msl::extent(msl_d, 2, msl_gz);"
)


def group_loop(before: str, body: str) -> str:
    """C++ that runs `before` once and `body` for each group of a range."""
    return f"""{{
  const msl::Dispatch& msl_d = *msl_dispatch;
  {before}
  for (ulong msl_g = msl_first; msl_g < msl_last; ++msl_g) {{
    {_GROUP_POSITION}
    {_GROUP_EXTENT}
    {body}
  }}
}}
"""


def loop_entry(kernel: Kernel, *, vectorize: bool) -> str:
    """Entry of a kernel without synchronisation: a loop over threads, x innermost.

    Args:
        vectorize: Promise that no two threads touch the same memory, so that clang need not prove it.
    """
    pragma = '_Pragma("clang loop vectorize(assume_safety)")' if vectorize else ""
    rows = "for (uint msl_z = 0; msl_z < msl_nz; ++msl_z) for (uint msl_y = 0; msl_y < msl_ny; ++msl_y)"
    head, shared = entry_signature("loop", kernel), shared_arguments(kernel)
    if any(parameter.role not in _GROUP_FREE for parameter in kernel.parameters):
        index = "const uint msl_index = (msl_z * msl_ny + msl_y) * msl_nx + msl_x;"
        body = f"{rows} {pragma} for (uint msl_x = 0; msl_x < msl_nx; ++msl_x) {{ {index} {_call(kernel)} }}"
        return head + group_loop(shared, body)
    # Neighbouring groups of a row make one long loop, over places in the grid.
    call = _call(kernel).replace("msl_gx * msl_d.threads[0] + msl_x", "msl_x")
    return f"""{head} {{
  const msl::Dispatch& msl_d = *msl_dispatch;
  {shared}
  for (ulong msl_g = msl_first; msl_g < msl_last;) {{
    {_GROUP_POSITION}
    {_GROUP_EXTENT}
    const uint msl_run = msl_last - msl_g < msl_d.groups[0] - msl_gx ? msl_last - msl_g : msl_d.groups[0] - msl_gx;
    const uint msl_begin = msl_gx * msl_d.threads[0];
    const uint msl_end = msl::smaller((msl_gx + msl_run) * msl_d.threads[0], msl_d.grid[0]);
    {rows} {pragma} for (uint msl_x = msl_begin; msl_x < msl_end; ++msl_x) {{ {call} }}
    msl_g += msl_run;
  }}
}}
"""


def fiber_entry(kernel: Kernel) -> str:
    """Entry that runs each thread of a group on a fiber of its own."""
    thread = f"""MSL_UNCHECKED static void msl_thread_{kernel.name}(void* msl_given) {{
  const msl::Group& msl_a = *(msl::Group*)msl_given;
  const msl::Dispatch& msl_d = *msl_a.d;
  const uint msl_gx = msl_a.gx, msl_gy = msl_a.gy, msl_gz = msl_a.gz;
  const uint msl_nx = msl_a.nx, msl_ny = msl_a.ny, msl_nz = msl_a.nz;
  const msl::Fiber& msl_f = *msl_worker->current;
  const uint msl_x = msl_f.position[0], msl_y = msl_f.position[1], msl_z = msl_f.position[2], msl_index = msl_f.index;
  {shared_arguments(kernel)}
  {_call(kernel)}
}}
"""
    run = f"""msl_w->checked_group = msl_g;
    msl::Group msl_a{{&msl_d, msl_gx, msl_gy, msl_gz, msl_nx, msl_ny, msl_nz}};
    if (!msl::run_fibers(msl_w, msl_nx, msl_ny, msl_nz, msl_thread_{kernel.name}, &msl_a)) return;"""
    return thread + entry_signature("fiber", kernel) + group_loop("", run)


def argument_table(kernels: list[Kernel]) -> str:
    """A table, read by the host, of the size and alignment that each buffer argument needs."""
    rows = []
    for number, kernel in enumerate(kernels):
        for parameter in kernel.buffers:
            kind = parameter.type.rstrip("&*").strip()
            rows.append(f"{{{number}, {parameter.index}, sizeof({kind}), alignof({kind})}}")
    rows.append("{~0u, 0, 0, 0}")
    return f"""extern "C" {{ MSL_EXPORT extern const msl::ArgumentNeed msl_arguments[];
const msl::ArgumentNeed msl_arguments[] = {{{", ".join(rows)}}}; }}
"""
