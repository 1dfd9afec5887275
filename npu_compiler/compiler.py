"""`compile`: IR JSON in, `CompiledProgram` out."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from npu_compiler.artifact.output_structure import output_names, usual_structure
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.artifact.shared_weights import share_weights
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import BFLOAT16, FLOAT16, DType
from npu_compiler.errors import CompileError
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.frontend.ir_source import IRSource, is_ir_source
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.graph.graph_optimizer import optimize
from npu_compiler.ir import IRGraph
from npu_compiler.lowering.constraint_checker import check_constraints
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.operand_forms import pairs_columns
from npu_compiler.lowering.planner import plan_graph
from npu_compiler.lowering.target import CodegenTarget, target_named

__all__ = ["compile"]


def compile(
    source: IRSource | Mapping[str, IRSource],
    target: str | None = None,
    dtype: str | None = None,
    device: str | DeviceModel | None = None,
) -> CompiledProgram:
    """Compiles a model for a target. The same IR gives the same program, byte for byte.

    Args:
        source: Path of an IR JSON file; or the IR itself: as a dict, as pytorch-ir's `IR`, or as `extract` gave it; or
            several of them by name, which become functions of one program that share their weights (a prefill of each
            length, and a decode step).
        target: Name of an installed target, such as ``metal`` or ``cuda``; ``metal`` when omitted.
        dtype: What to compute in, ``float16`` or ``bfloat16``; by default what the weights are in, and float16 for a
            float32 model.
        device: The GPU to choose kernels and their sizes for, by the name that the target knows it by, such as
            ``sm_80`` or ``apple_m2``, or as a model of one's own; the target's default when omitted. Another GPU runs
            the program as well, as fast as those choices suit it.

    Raises:
        IRError: The IR is malformed.
        UnsupportedOpError: A node cannot run on the target; `partition` runs such nodes on the CPU.
        CompileError: An option is wrong, or functions disagree about a weight.
    """
    chosen = target_named(target, device)
    with _without_collections():
        return _compiled(source, chosen, dtype)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python's collector of cycles from running: compiling makes many objects and hardly a cycle, and a process
    that has imported PyTorch takes as long to look through as a small model takes to compile.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


def _compiled(source: IRSource | Mapping[str, IRSource], chosen: CodegenTarget, dtype: str | None) -> CompiledProgram:
    graphs = {name: read_graph(ir) for name, ir in _functions(source).items()}
    computes = {compute_dtype(graph, chosen, dtype) for graph in graphs.values()}
    if len(computes) > 1:
        raise CompileError(f"the functions compute in {', '.join(sorted(map(str, computes)))}, expected one data type")
    compute = computes.pop()
    planned = {name: _plan(graph, chosen, compute) for name, graph in graphs.items()}
    plans, recipes = share_weights(planned)
    model = next(iter(graphs.values())).name
    return CompiledProgram(chosen.name, model, compute.name, plans, recipes)


def _functions(source: IRSource | Mapping[str, IRSource]) -> dict[str, IRSource]:
    """The functions by name; a lone IR is called ``main``."""
    if not isinstance(source, Mapping) or "nodes" in source or "graph_inputs" in source:
        return {"main": source}
    if not source or not all(isinstance(name, str) and is_ir_source(ir) for name, ir in source.items()):
        raise CompileError(f"given {list(source)[:8]}, expected an IR or a mapping of names to IRs")
    return dict(source)


def _plan(graph: IRGraph, target: CodegenTarget, compute: DType) -> tuple[ExecutionPlan, tuple[WeightRecipe, ...]]:
    """One function, from the graph as it was read."""
    host_dtypes = {name: spec.dtype for name, spec in graph.tensors.items()}
    pairs = pairs_columns(target, target.loads)
    optimized = assign_dtypes(optimize(graph, pairs, target.launch_flops, target.multiplies_codes), compute).verify()
    host_dtypes.update({name: recipe.spec.host_dtype for name, recipe in optimized.weights.items()})
    check_constraints(optimized, target.storage_dtypes)
    structure = graph.structure if graph.structure is not None else usual_structure(len(graph.outputs))
    names = output_names(structure, graph.outputs)
    outputs = {name: graph.tensors[tensor].dtype for name, tensor in zip(names, graph.outputs, strict=True)}
    plan, recipes = plan_graph(optimized, target, host_dtypes, outputs)
    return replace(plan, structure="" if graph.structure is None else json.dumps(structure)), recipes


def compute_dtype(graph: IRGraph, target: CodegenTarget, requested: str | None) -> DType:
    """The half precision to compute in.

    Raises:
        CompileError: Another one was requested than the target or the model's weights allow.
    """
    sizes: Mapping[DType, int] = {
        kind: sum(1 for name in graph.weights if graph.tensors[name].dtype == kind) for kind in (FLOAT16, BFLOAT16)
    }
    own = graph.compute_dtype or (max(sizes, key=lambda kind: sizes[kind]) if any(sizes.values()) else None)
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
