"""A compiled program as text, for people: everything it holds but the kernels' own lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from npu_compiler.artifact.plan import Argument, Call, CallChoice, ExecutionPlan, KernelCall, LibraryCall, Step
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.tensor.index_check import IndexCheck
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["counted", "describe_program", "format_bytes"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit and at most one decimal: ``512 B``, ``4.2 MiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 launch``, ``2 launches``."""
    plural = "es" if noun.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def describe_program(
    header: Mapping[str, str], functions: Mapping[str, ExecutionPlan], recipes: Sequence[WeightRecipe]
) -> str:
    """The whole program: header, each function's borders and state; weights with their recipes; then each function's
    buffers, steps, kernels and notes.

    Args:
        header: What there is to say of the program as a whole; first its name.
        functions, recipes: What it holds.
    """
    (title, name), *facts = header.items()
    lines = chain(
        [f"{title} {name}"],
        (f"  {fact:<14} {value}" for fact, value in facts),
        *(_borders(name, plan) for name, plan in functions.items()),
        _weights(recipes),
        *(_function(name, plan) for name, plan in functions.items()),
    )
    return "\n".join(lines) + "\n"


def _weights(recipes: Sequence[WeightRecipe]) -> Iterator[str]:
    total = sum(recipe.spec.nbytes for recipe in recipes)
    sources = {source.name for recipe in recipes for source in recipe.inputs}
    yield ""
    made = f"made from {counted(len(sources), 'tensor')} of the weight file"
    yield f"weights: {counted(len(recipes), 'tensor')}, {format_bytes(total)}, {made}"
    for transform, count in sorted(
        Counter(recipe.transform if recipe.inputs or recipe.stages else "constant" for recipe in recipes).items()
    ):
        yield f"  {transform:<16} {count}"
    for recipe in recipes:
        yield f"  {_spec(recipe.spec)} = {_recipe(recipe)}"


def _recipe(recipe: WeightRecipe) -> str:
    if not recipe.inputs and not recipe.stages:
        return f"a constant of {len(recipe.data)} bytes in the program"
    sources = [f"{source.name} {source.dtype}{_shape(source.shape)}" for source in recipe.inputs]
    attrs = [f"{name}={value:g}" for name, value in recipe.attrs]
    steps = [counted(len(recipe.stages), "stage")] if recipe.stages else []
    return f"{recipe.transform}({', '.join(sources + attrs + steps)})"


def _borders(name: str, plan: ExecutionPlan) -> Iterator[str]:
    flops, nbytes = sum(call.flops for call in plan.calls), sum(call.nbytes for call in plan.calls)
    steps = counted(len(plan.steps), "step")
    yield ""
    yield f"function {name}: {steps}, {_flops(flops)}, {format_bytes(nbytes)} moved at the least"
    yield from _listed("inputs", [_spec(spec) for spec in plan.inputs])
    yield from _listed("outputs", [_spec(spec) for spec in plan.outputs])
    yield from _listed("state, updated in place", [f"{output} is {source}" for output, source in plan.state])


def _function(name: str, plan: ExecutionPlan) -> Iterator[str]:
    yield ""
    yield f"plan of {name}:"
    yield f"  arena {format_bytes(plan.arena_bytes)} ({plan.arena_bytes} bytes)"
    yield from _listed(
        "buffers", [f"{i}: {b.role.value} {b.name} {b.nbytes} bytes" for i, b in enumerate(plan.buffers)]
    )
    yield f"  steps: {len(plan.steps)}"
    for index, step in enumerate(plan.steps):
        yield from _step(index, step, plan)
    yield from _listed("kernels", _kernels(plan))
    yield from _listed("indices that are checked", [_check(check) for check in plan.checks])
    yield from _listed("notes", plan.notes)


def _listed(title: str, items: Sequence[str]) -> Iterator[str]:
    """A titled list; nothing at all when it is empty."""
    if items:
        yield f"  {title}: {len(items)}"
        yield from (f"    {item}" for item in items)


def _step(index: int, step: Step, plan: ExecutionPlan) -> Iterator[str]:
    yield f"    {index}: {step.label}"
    if not isinstance(step, CallChoice):
        yield from _call(step, plan)
        return
    for call in step.preferred.calls:
        yield from _call(call, plan)
    devices = step.preferred.requires or "any device"
    yield f"       preferred of {counted(len(step.options), 'option')}, for {devices}"


def _call(step: Call, plan: ExecutionPlan) -> Iterator[str]:
    if isinstance(step, KernelCall):
        kernel = plan.kernels[step.kernel]
        launch = f"grid {_shape(step.grid)} block {_shape(step.block)}"
        if step.extension is not None:
            launch += f" {step.extension.describe()}"
        yield f"       kernel {kernel.entry} ({kernel.digest[:12]}), {launch}, {len(step.params)} parameter bytes"
    else:
        yield f"       library {step.routine}{_attrs(step)}"
    yield f"       binds {', '.join(_argument(argument, plan) for argument in step.args)}"
    yield f"       {_flops(step.flops)}, {format_bytes(step.nbytes)}"


def _attrs(step: LibraryCall) -> str:
    return "".join(f", {name}={value}" for name, value in sorted(step.attrs.items()))


def _argument(argument: Argument, plan: ExecutionPlan) -> str:
    buffer = plan.buffers[argument.buffer]
    name = buffer.name or buffer.role.value
    extension = "" if argument.extension is None else f" {argument.extension.describe()}"
    return f"{'out ' if argument.writes else ''}{name}+{argument.offset}{extension}"


def _kernels(plan: ExecutionPlan) -> list[str]:
    launches = Counter(call.kernel for call in plan.calls if isinstance(call, KernelCall))
    return [
        f"{kernel.entry} ({kernel.digest[:12]}), {counted(len(kernel.text.splitlines()), 'line')}, "
        + (counted(launches[index], "launch") if index in launches else "only in other options")
        for index, kernel in enumerate(plan.kernels)
    ]


def _check(check: IndexCheck) -> str:
    lowest = -check.extent if check.wraps else 0
    return f"{check.tensor} {_shape(check.shape)} of {check.node}: {lowest} to {check.extent - 1}"


def _spec(spec: BufferSpec) -> str:
    layout = spec.layout
    text = f"{spec.name} {spec.dtype}{_shape(layout.shape)}"
    if layout.is_padded:
        text += f" padded to {_shape(layout.alloc_shape)}"
    if layout.order != tuple(range(len(layout.order))):
        text += f" in order {_shape(layout.order)}"
    if spec.host_dtype != spec.dtype:
        text += f", {spec.host_dtype} on the host"
    return f"{text}, {spec.nbytes} bytes"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _flops(count: int) -> str:
    return f"{count / 1e9:.3f} GFLOP" if count >= 1e6 else f"{count} FLOP"
