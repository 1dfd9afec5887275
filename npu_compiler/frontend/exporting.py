"""Runs `torch.export` and sees to it that the graph means what a list of pure operations means."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx.config
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.idle import remove_idle
from npu_compiler.frontend.mutation import calls_subgraph, needs_functional_form

__all__ = ["export"]

_LINE = re.compile(r'raised this error:\n\s+File "([^"\n]+)", line (\d+), in [^\n]*(?:\n    +(\S[^\n]*))?')


def export(
    model: torch.nn.Module, example_inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor
) -> ExportedProgram:
    """Exports a model in eval mode, in functional form where its in-place operations could be seen elsewhere.

    Raises:
        ExtractionError: As `npu_compiler.extract`.
    """
    _check_model(model)
    args, kwargs = _arguments(example_inputs)
    # torch deprecates parts of itself from one release to the next; its users can do nothing about it.
    with torch.no_grad(), warnings.catch_warnings(), _without_what_nobody_reads():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(model, args, kwargs)
            remove_idle(exported)
            if needs_functional_form(exported):
                # The empty table keeps every operation whole; what remains is functionalisation and inlining of
                # subgraphs.
                exported = exported.run_decompositions({})
        except Exception as error:  # torch.export lets through whatever the model or the tracer raised
            raise ExtractionError(
                f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {_first_line(error)}"
                f"{_place(error)}. {_remedy(error)}"
            ) from error
    _check_values(exported)
    _check_pure(exported)
    return exported


@contextmanager
def _without_what_nobody_reads() -> Iterator[None]:
    """Exports without what PyTorch keeps for debugging: a third of the time.

    Each node would record the stack that made it, and each of the graphs on the way be printed as Python and compiled,
    which a lazy one is when it is run.
    """
    records = hasattr(torch.fx.config, "do_not_emit_stack_traces")  # older releases always keep them
    before = records and torch.fx.config.do_not_emit_stack_traces
    try:
        if records:
            torch.fx.config.do_not_emit_stack_traces = True
        with _use_lazy_graph_module(True):
            yield
    finally:
        if records:
            torch.fx.config.do_not_emit_stack_traces = before


def _check_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ExtractionError(f"given a {type(model).__name__} as model, expected a torch.nn.Module")
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        where = f"its submodule '{training}'" if training else "the model"
        raise ExtractionError(
            f"{where} is in training mode, expected eval mode, in which dropout does nothing and BatchNorm uses its "
            "running statistics; call model.eval() first"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ExtractionError(
                f"'{name}' is on the meta device and has no values; load the weights before extracting the model"
            )


def _arguments(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise ExtractionError(
        f"given a {type(example_inputs).__name__} as example_inputs, expected a tuple of positional arguments, "
        "a mapping of keyword arguments or a tensor"
    )


def _check_values(exported: ExportedProgram) -> None:
    """Refuses sizes and numbers that are known only when the model runs: the device's program is fixed before.

    And operators that return lists of tensors inside of a tuple, for which IR has no name.
    """
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (tuple, list)):
                raise ExtractionError(
                    f"node '{node.name}' ({node.target}) returns lists inside of a tuple; expected tensors, or one "
                    "list of them: leave it out of the model"
                )
            shape = tuple(item.shape) if isinstance(item, torch.Tensor) else ()
            is_number = isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if is_number or not all(type(size) is int for size in shape):
                what = "is a number taken from a tensor" if is_number else f"has the shape {shape}"
                raise ExtractionError(
                    f"node '{node.name}' ({node.target}) {what}, which is known only when the model runs; expected "
                    "static shapes: remove what depends on values (nonzero, item, a boolean index) or pad it"
                )


def _check_pure(exported: ExportedProgram) -> None:
    """Refuses what a program without memory of its own cannot do: change buffers, or inputs that it does not return."""
    outputs = exported.graph_signature.output_specs
    returned = {spec.arg.name for spec in outputs if spec.kind is OutputKind.USER_OUTPUT}
    for spec in outputs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION and spec.arg.name not in returned:
            raise ExtractionError(
                f"the model changes its input '{spec.target}' in place but does not return it, so that the change "
                "would be lost; return the changed tensor as an output"
            )
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise ExtractionError(
                f"the model changes its own tensor '{spec.target}' when it runs; expected a model without state: take "
                "the tensor as an input and return the new one"
            )
    for node in exported.graph.nodes:
        if calls_subgraph(node):
            raise ExtractionError(
                f"node '{node.name}' ({node.target}) runs a graph inside the graph; expected plain operations: remove "
                "the torch.cond, scan or checkpoint it comes from"
            )


def _remedy(error: Exception) -> str:
    if "in output, which is not a known type" in str(error):
        return (
            "Expected a forward() that returns tensors, in lists, tuples, mappings or dataclasses that "
            "torch.utils._pytree knows; leave the object out of the result (models of transformers return caches "
            "unless config.use_cache is False)"
        )
    return (
        "Expected a forward() that takes these inputs and whose control flow depends on shapes alone; write what "
        "depends on the values of tensors with torch.where"
    )


def _place(error: Exception) -> str:
    """The line of the model that torch.export names."""
    found = _LINE.search(str(error))
    if found is None:
        return ""
    return f", at line {found[2]} of {Path(found[1]).name}" + (f": `{found[3]}`" if found[3] else "")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else "no message"
