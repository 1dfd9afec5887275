"""Checks that functions take and give what a folder says of them.

The host fills tables of pages and counts positions by what ``generation.json`` says, so that kernels can rely on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from npu_compiler.artifact.batch_spec import BatchSpec
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.errors import IRError

__all__ = ["check_batch", "check_steps"]

_Shapes = dict[str, tuple[int, ...]]


class _Function(Protocol):
    """A plan of a program, or of `npu_compiler.partition`; its tensors have a name and a shape."""

    @property
    def inputs(self) -> Sequence[Any]: ...

    @property
    def outputs(self) -> Sequence[Any]: ...


def check_steps(spec: GenerationSpec, functions: Mapping[str, _Function]) -> None:
    """Checks the functions of one text.

    Raises:
        IRError: One is missing, or takes or gives other tensors than the folder says.
    """
    for name, step in spec.functions.items():
        inputs: _Shapes = {step.tokens: (1, step.length), step.positions: (step.length,)}
        inputs |= {step.last: (1,)} if step.last else {}
        states = [*zip(step.caches, spec.cache_shapes, strict=True)]
        _check(name, functions, inputs, {step.logits: (1, 1, spec.vocabulary)}, states)


def check_batch(batch: BatchSpec, vocabulary: int, functions: Mapping[str, _Function]) -> None:
    """Checks the functions of many texts.

    Raises:
        IRError: As `check_steps`.
    """
    for name, step in batch.functions.items():
        size = (step.lanes, step.length)
        inputs: _Shapes = {step.tokens: size, step.positions: size}
        inputs |= {step.tables: (step.lanes, batch.context // batch.page_tokens)}
        inputs |= {step.last: (1,)} if step.last else {}
        logits = (step.lanes, 1 if step.last else step.length, vocabulary)
        states = [*zip(step.pools, batch.pool_shapes, strict=True)]
        _check(name, functions, inputs, {step.logits: logits} if step.logits else {}, states)


def _check(
    name: str,
    functions: Mapping[str, _Function],
    inputs: _Shapes,
    outputs: _Shapes,
    states: Iterable[tuple[tuple[str, str], tuple[int, ...]]],
) -> None:
    if name not in functions:
        raise IRError(f"the folder names a function '{name}', which its program has not; extract the model again")
    for (given, made), shape in states:
        inputs, outputs = inputs | {given: shape}, outputs | {made: shape}
    function = functions[name]
    for what, expected, specs in (("takes", inputs, function.inputs), ("gives", outputs, function.outputs)):
        found = {spec.name: tuple(spec.shape) for spec in specs}
        wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        if wrong:
            raise IRError(
                f"function '{name}' {what} '{wrong[0]}' of shape {found.get(wrong[0])}, the folder says "
                f"{expected.get(wrong[0])}; extract the model again"
            )
