"""One set of weights for several functions: what is made alike is made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter

from npu_compiler.artifact.plan import Buffer, ExecutionPlan, Role
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.errors import CompileError
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["share_weights"]

Planned = Mapping[str, tuple[ExecutionPlan, tuple[WeightRecipe, ...]]]


def share_weights(planned: Planned) -> tuple[dict[str, ExecutionPlan], tuple[WeightRecipe, ...]]:
    """Gives equal weights one name in all functions, and different ones different names.

    Args:
        planned: Plan and recipes of each function. Tied weights, which a function reads under two names, count as
            equal too.

    Raises:
        CompileError: Two functions expect tensors of different shape or dtype under one name of the weight file.
    """
    _check_inputs(planned)
    shared: dict[object, WeightRecipe] = {}  # by what is made, without its name
    taken: set[str] = set()
    plans = {}
    for function, (plan, recipes) in planned.items():
        names: dict[str, str] = {}
        for recipe in recipes:
            content = _ALL_BUT_SPEC(recipe), _ALL_BUT_NAME(recipe.spec)
            same = shared.setdefault(content, recipe)
            if same is recipe:
                name = _unused(recipe.spec.name, taken)
                if name != recipe.spec.name:
                    same = shared[content] = replace(recipe, spec=replace(recipe.spec, name=name))
            names[recipe.spec.name] = same.spec.name
        plans[function] = replace(plan, buffers=tuple(_renamed(buffer, names) for buffer in plan.buffers))
    return plans, tuple(shared.values())


_ALL_BUT_SPEC = attrgetter(*(field.name for field in fields(WeightRecipe) if field.name != "spec"))
_ALL_BUT_NAME = attrgetter(*(field.name for field in fields(BufferSpec) if field.name != "name"))


def _unused(name: str, taken: set[str]) -> str:
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}#{number}", number + 1
    taken.add(unique)
    return unique


def _renamed(buffer: Buffer, names: Mapping[str, str]) -> Buffer:
    name = names[buffer.name] if buffer.role is Role.WEIGHT else buffer.name
    return buffer if name == buffer.name else replace(buffer, name=name)


def _check_inputs(planned: Planned) -> None:
    known: dict[str, tuple[WeightInput, str]] = {}
    for function, (_, recipes) in planned.items():
        for source in (source for recipe in recipes for source in recipe.inputs):
            other, where = known.setdefault(source.name, (source, function))
            if other != source:
                raise CompileError(
                    f"the weight '{source.name}' is {other.dtype}{list(other.shape)} in function '{where}' and "
                    f"{source.dtype}{list(source.shape)} in '{function}'; extract all functions from one model"
                )
