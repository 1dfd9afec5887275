"""The CUDA target: its layouts, its dialect, its lowering and its hand-written kernels. Needs no GPU and no CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda_compiler.op_support import is_cuda_op_supported

if TYPE_CHECKING:
    from npu_compiler.compiled_program import CompiledProgram
    from npu_compiler.frontend.ir_source import IRSource

__all__ = ["compile_subgraph", "is_cuda_op_supported"]


def compile_subgraph(ir_dict: IRSource, dtype: str | None = None, device: str | None = None) -> CompiledProgram:
    """Compiles a graph, or a partition of one, for CUDA: `npu_compiler.compile` with ``target="cuda"``."""
    from npu_compiler.compiler import compile

    return compile(ir_dict, target="cuda", dtype=dtype, device=device)
