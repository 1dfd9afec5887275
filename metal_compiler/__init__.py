"""The Metal target: its layouts, its dialect, its lowering and its hand-written kernels. Needs no GPU and no Metal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_compiler.op_support import is_metal_op_supported

if TYPE_CHECKING:
    from npu_compiler.compiled_program import CompiledProgram
    from npu_compiler.frontend.ir_source import IRSource

__all__ = ["compile_subgraph", "is_metal_op_supported"]


def compile_subgraph(ir_dict: IRSource, dtype: str | None = None) -> CompiledProgram:
    """Compiles a graph, or a partition of one, for Metal: `npu_compiler.compile` with ``target="metal"``."""
    from npu_compiler.compiler import compile

    return compile(ir_dict, target="metal", dtype=dtype)
