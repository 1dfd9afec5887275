"""Ahead-of-time compiler: PyTorch models, as IR JSON, to programs for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import NPUError
from npu_compiler.op_support import get_supported_ops, is_op_supported
from npu_compiler.partitioner import partition

if TYPE_CHECKING:
    from npu_compiler.frontend.extraction import extract

__version__ = "0.1.0"

__all__ = ["CompiledProgram", "NPUError", "compile", "extract", "get_supported_ops", "is_op_supported", "partition"]


def __getattr__(name: str) -> Any:
    """`extract` is found only when it is asked for: it alone needs torch."""
    if name == "extract":
        from npu_compiler.frontend.extraction import extract

        return extract
    raise AttributeError(f"module 'npu_compiler' has no attribute '{name}'")
