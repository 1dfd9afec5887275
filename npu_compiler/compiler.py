"""`compile`: IR JSON in, `CompiledProgram` out."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.codegen.planner import plan_graph
from npu_compiler.codegen.target import CodegenTarget, target_named
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.constraint_checker import check_constraints
from npu_compiler.dtypes import BFLOAT16, FLOAT16, DType
from npu_compiler.errors import CompileError
from npu_compiler.graph_optimizer import assign_dtypes, optimize
from npu_compiler.ir import IRGraph
from npu_compiler.ir_reader import IRSource, read_graph

__all__ = ["compile"]


def compile(source: IRSource, target: str = "metal", dtype: str | None = None) -> CompiledProgram:
    """Compiles a model for a target. The same IR gives the same program, byte for byte.

    Args:
        source: Path of an IR JSON file, or the IR itself as a dict.
        target: ``metal`` or ``cuda``.
        dtype: What to compute in, ``float16`` or ``bfloat16``; by default what the weights are in, and float16 for a
            float32 model.

    Raises:
        IRError: The IR is malformed.
        UnsupportedOpError: A node cannot run on the target; `partition` runs such nodes on the CPU.
        CompileError: An option is wrong.
    """
    chosen = target_named(target)
    graph = read_graph(source)
    compute = compute_dtype(graph, chosen, dtype)
    host_dtypes = {name: spec.dtype for name, spec in graph.tensors.items()}
    names = graph.outputs
    optimized = assign_dtypes(optimize(graph, chosen.pairs_columns), compute).verify()
    host_dtypes.update({name: optimized.weights[name].spec.host_dtype for name in optimized.weights})
    check_constraints(optimized, chosen.storage_dtypes)
    plan, recipes = plan_graph(optimized, chosen, host_dtypes, names)
    return CompiledProgram(chosen.name, graph.name, compute.name, {"main": plan}, recipes)


def compute_dtype(graph: IRGraph, target: CodegenTarget, requested: str | None) -> DType:
    """The half precision to compute in.

    Raises:
        CompileError: Another one was requested than the target or the model's weights allow.
    """
    sizes: Mapping[DType, int] = {
        kind: sum(1 for name in graph.weights if graph.tensors[name].dtype == kind) for kind in (FLOAT16, BFLOAT16)
    }
    own = max(sizes, key=lambda kind: sizes[kind]) if any(sizes.values()) else None
    if requested is None:
        return own or FLOAT16
    if requested not in target.compute_dtypes:
        raise CompileError(
            f"given dtype='{requested}', target '{target.name}' computes in {', '.join(target.compute_dtypes)}"
        )
    if own is not None and own.name != requested:
        raise CompileError(
            f"given dtype='{requested}' for a model whose weights are {own}; leave dtype out or convert the model"
        )
    return FLOAT16 if requested == FLOAT16.name else BFLOAT16
