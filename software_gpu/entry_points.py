"""Writes the C++ functions through which a compiled library's kernels are called.

A kernel without synchronisation is inlined in a loop over a row of threads. One with barriers or collectives runs on
fibers, and in region form where `regions` can give it one.
"""

from __future__ import annotations

from software_gpu.msl_parser import Kernel, Parameter

__all__ = ["argument_table", "builtin_value", "fiber_entry", "loop_entry", "parameter_value"]

# Threads and groups in scope of the text: x y z in the threadgroup, index in it, gx gy gz of the group, nx ny nz its
# extent, `d` the dispatch.
_BUILTIN_VALUES = {
    "thread_position_in_grid": ("gx * d.threads[0] + x", "gy * d.threads[1] + y", "gz * d.threads[2] + z"),
    "thread_position_in_threadgroup": ("x", "y", "z"),
    "thread_index_in_threadgroup": ("index", "0", "0"),
    "thread_index_in_simdgroup": ("index % 32", "0", "0"),
    "thread_index_in_quadgroup": ("index % 4", "0", "0"),
    "quadgroup_index_in_threadgroup": ("index / 4", "0", "0"),
    "simdgroup_index_in_threadgroup": ("index / 32", "0", "0"),
    "simdgroups_per_threadgroup": ("(nx * ny * nz + 31) / 32", "0", "0"),
    "dispatch_simdgroups_per_threadgroup": ("(d.threads[0] * d.threads[1] * d.threads[2] + 31) / 32", "0", "0"),
    "threadgroup_position_in_grid": ("gx", "gy", "gz"),
    "threadgroups_per_grid": ("d.groups[0]", "d.groups[1]", "d.groups[2]"),
    "threads_per_grid": ("d.grid[0]", "d.grid[1]", "d.grid[2]"),
    "threads_per_threadgroup": ("nx", "ny", "nz"),
    "dispatch_threads_per_threadgroup": ("d.threads[0]", "d.threads[1]", "d.threads[2]"),
    "threads_per_simdgroup": ("32", "1", "1"),
    "thread_execution_width": ("32", "1", "1"),
}
# What a kernel may ask and still be indifferent to where one threadgroup ends and the next begins.
_GROUP_FREE = frozenset({"thread_position_in_grid", "threads_per_grid", "buffer"})


def builtin_value(parameter: Parameter) -> str:
    """The C++ expression of a parameter that the GPU fills in."""
    x, y, z = _BUILTIN_VALUES[parameter.role]
    return f"msl::position<{parameter.type}>({x}, {y}, {z})"


def parameter_value(parameter: Parameter) -> str:
    """The C++ expression of any parameter."""
    if parameter.role == "buffer":
        address = f"d.buffers[{parameter.index}]"
    elif parameter.role == "threadgroup":
        address = f"(msl_worker->threadgroup_memory + d.threadgroup_offsets[{parameter.index}])"
    else:
        return builtin_value(parameter)
    if parameter.is_reference:
        return f"*({parameter.type.removesuffix('&')}*){address}"
    return f"({parameter.type}){address}"


def _call(kernel: Kernel) -> str:
    return f"::{kernel.name}({', '.join(parameter_value(parameter) for parameter in kernel.parameters)})"


def _signature(form: str, kernel: Kernel) -> str:
    return (
        f'extern "C" MSL_EXPORT MSL_UNCHECKED void msl_{form}_{kernel.name}'
        "(msl::Worker* worker, const msl::Dispatch* dispatch, ulong first_group, ulong last_group)"
    )


def group_loop(body: str) -> str:
    """C++ that runs `body` for each group of a range, its position and extent in scope."""
    return f"""
  const msl::Dispatch& d = *dispatch;
  for (ulong group = first_group; group < last_group; ++group) {{
    const uint gx = group % d.groups[0], gy = group / d.groups[0] % d.groups[1], gz = group / d.groups[0] / d.groups[1];
    const uint nx = msl::extent(d, 0, gx), ny = msl::extent(d, 1, gy), nz = msl::extent(d, 2, gz);
    {body}
  }}
"""


def loop_entry(kernel: Kernel, *, vectorize: bool) -> str:
    """Entry of a kernel without synchronisation: a loop over threads, x innermost.

    Args:
        vectorize: Promise that no two threads touch the same memory, so that clang need not prove it.
    """
    pragma = '_Pragma("clang loop vectorize(assume_safety)")' if vectorize else ""
    merges_groups = all(parameter.role in _GROUP_FREE for parameter in kernel.parameters)
    if not merges_groups:
        rows = f"for (uint z = 0; z < nz; ++z) for (uint y = 0; y < ny; ++y) {pragma} for (uint x = 0; x < nx; ++x)"
        return (
            f"{_signature('loop', kernel)} {{"
            + group_loop(f"{rows} {{ const uint index = (z * ny + y) * nx + x; {_call(kernel)}; }}")
            + "}"
        )
    position = "msl::position<{}>(x, gy * d.threads[1] + y, gz * d.threads[2] + z)"
    arguments = [
        position.format(parameter.type) if parameter.role == "thread_position_in_grid" else parameter_value(parameter)
        for parameter in kernel.parameters
    ]
    # Neighbouring groups of a row make one long loop.
    return f"""{_signature("loop", kernel)} {{
  const msl::Dispatch& d = *dispatch;
  for (ulong group = first_group; group < last_group;) {{
    const uint gx = group % d.groups[0], gy = group / d.groups[0] % d.groups[1], gz = group / d.groups[0] / d.groups[1];
    const uint run = last_group - group < d.groups[0] - gx ? last_group - group : d.groups[0] - gx;
    const uint ny = msl::extent(d, 1, gy), nz = msl::extent(d, 2, gz);
    const uint begin = gx * d.threads[0], end = msl::smaller((gx + run) * d.threads[0], d.grid[0]);
    for (uint z = 0; z < nz; ++z) for (uint y = 0; y < ny; ++y) {pragma}
      for (uint x = begin; x < end; ++x) {{ ::{kernel.name}({", ".join(arguments)}); }}
    group += run;
  }}
}}"""


def fiber_entry(kernel: Kernel) -> str:
    """Entry that runs each thread of a group on a fiber of its own."""
    setup = (
        "const msl::Dispatch& d = *a->d; const uint gx = a->gx, gy = a->gy, gz = a->gz, nx = a->nx, ny = a->ny, "
        "nz = a->nz; const msl::Fiber& fiber = *msl_worker->current; const uint x = fiber.position[0], "
        "y = fiber.position[1], z = fiber.position[2], index = fiber.index;"
    )
    run = "msl::Group a{&d, gx, gy, gz, nx, ny, nz}; if (!msl::run_fibers(worker, nx, ny, nz, msl_thread_"
    return (
        f"MSL_UNCHECKED static void msl_thread_{kernel.name}(void* given) {{ const msl::Group* a = (msl::Group*)given; "
        f"{setup} {_call(kernel)}; }}\n"
        f"{_signature('fiber', kernel)} {{" + group_loop(f"{run}{kernel.name}, &a)) return;") + "}"
    )


def argument_table(kernels: list[Kernel]) -> str:
    """A table, read by the host, of the size and alignment that each buffer argument needs."""
    rows = []
    for number, kernel in enumerate(kernels):
        for parameter in kernel.buffers:
            kind = parameter.type.rstrip("&*").strip()
            rows.append(f"{{{number}, {parameter.index}, sizeof({kind}), alignof({kind})}}")
    rows.append("{~0u, 0, 0, 0}")
    return f"""extern "C" MSL_EXPORT extern const msl::ArgumentNeed msl_arguments[] = {{{", ".join(rows)}}};
extern "C" MSL_EXPORT ulong msl_threadgroup_lengths(const msl::ThreadgroupLength** begin) {{
  *begin = msl::__start_msl_lengths;
  return msl::__stop_msl_lengths - msl::__start_msl_lengths;
}}"""
