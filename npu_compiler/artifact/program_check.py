"""Checks that a program read from a file contradicts itself nowhere, so that the runtime need not ask again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from npu_compiler.artifact.output_structure import parse_structure
from npu_compiler.artifact.plan import Call, CallChoice, ExecutionPlan, KernelCall, Role
from npu_compiler.artifact.recipes import EXPRESSIONS, WeightRecipe
from npu_compiler.artifact.stages import check_stages
from npu_compiler.errors import IRError, ProgramFormatError
from npu_compiler.tensor.index_check import FAULT_BYTES
from npu_compiler.tensor.layout import BufferSpec

__all__ = ["check_program"]

_MAX_BYTES = 1 << 48
_MAX_RANK = 16
_MAX_SHARED = 1 << 20
_MAX_THREADS = 1024  # of a threadgroup, on every device
_MAX_GROUPS = 1 << 40  # threadgroups of a launch; a device counts them in 64 bits
_MAX_PARAMS = 4096  # Metal's limit for setBytes, CUDA's for kernel parameters


def check_program(functions: Mapping[str, ExecutionPlan], recipes: Sequence[WeightRecipe], origin: str) -> None:
    """Checks indices, sizes and names of a program.

    Args:
        functions, recipes: What it holds.
        origin: Where it comes from, for error messages.

    Raises:
        ProgramFormatError: Something points outside of what it points into.
    """
    if not functions:
        raise ProgramFormatError(f"{origin}: the program has no function; compile the model again")
    for recipe in recipes:
        _check_spec(recipe.spec, origin)
        if recipe.transform == EXPRESSIONS:
            check_stages(recipe.spec.name, recipe.stages, len(recipe.inputs))
    weights = _sizes(recipe.spec for recipe in recipes)
    _require(len(weights) == len(recipes), origin, "two weights have one name")
    for name, plan in functions.items():
        _check_plan(plan, weights, f"{origin}, function '{name}'")


def _require(condition: bool, origin: str, what: str) -> None:
    if not condition:
        raise ProgramFormatError(f"{origin}: {what}; the file is damaged, compile the model again")


def _check_spec(spec: BufferSpec, origin: str) -> None:
    layout = spec.layout
    rank = len(layout.shape)
    _require(rank <= _MAX_RANK and len(layout.alloc_shape) == rank, origin, f"'{spec.name}' has mismatched shapes")
    _require(sorted(layout.order) == list(range(rank)), origin, f"'{spec.name}' has an order that is no permutation")
    fits = all(0 <= n <= alloc for n, alloc in zip(layout.shape, layout.alloc_shape, strict=True))
    reach = spec.dtype.size * prod(n or 1 for n in layout.alloc_shape)  # numpy has no larger arrays, empty ones neither
    _require(fits and reach <= _MAX_BYTES, origin, f"'{spec.name}' has an impossible size")


def _check_plan(plan: ExecutionPlan, weights: dict[str, int], origin: str) -> None:
    for spec in (*plan.inputs, *plan.outputs):
        _check_spec(spec, origin)
    inputs, outputs = _sizes(plan.inputs), _sizes(plan.outputs)
    known = {Role.INPUT: inputs, Role.OUTPUT: outputs, Role.WEIGHT: weights}
    for buffer in plan.buffers:
        _require(0 <= buffer.nbytes <= _MAX_BYTES, origin, f"buffer '{buffer.name}' has an impossible size")
        if buffer.role is Role.FAULTS:
            _require((buffer.name, buffer.nbytes) == ("", FAULT_BYTES), origin, "the record of faults has another size")
        elif buffer.role is not Role.ARENA:
            declared = known[buffer.role].get(buffer.name)
            what = f"{buffer.role.value} buffer '{buffer.name}' of {buffer.nbytes} bytes is declared as {declared}"
            _require(declared == buffer.nbytes, origin, what)
    bound = [(buffer.role, buffer.name) for buffer in plan.buffers if buffer.role in known]
    _require(len(set(bound)) == len(bound), origin, "two buffers are one tensor")
    _require(len(inputs) == len(plan.inputs), origin, "two inputs have one name")
    _require(len(outputs) == len(plan.outputs), origin, "two outputs have one name")
    try:
        parse_structure(plan.structure, len(plan.outputs))
    except IRError as error:
        raise ProgramFormatError(f"{origin}: {error}") from error
    for check in plan.checks:
        sizes = (check.extent, *check.shape)
        _require(all(0 < n <= _MAX_BYTES for n in sizes), origin, f"the check of '{check.tensor}' has impossible sizes")
    for output, source in plan.state:
        known_pair = output in outputs and source in inputs and outputs[output] == inputs[source]
        _require(known_pair, origin, f"the state '{output}' is not an output in the place of an input of its size")
    written = {buffer.name for buffer in plan.buffers if buffer.role is Role.OUTPUT} | dict(plan.state).keys()
    _require(outputs.keys() <= written, origin, f"no step can write the outputs {sorted(outputs.keys() - written)}")
    for step in plan.steps:
        if isinstance(step, CallChoice):
            _check_choice(plan, step, origin)
        else:
            _check_call(plan, step, origin)


def _sizes(specs: Iterable[BufferSpec]) -> dict[str, int]:
    return {spec.name: spec.nbytes for spec in specs}


def _check_choice(plan: ExecutionPlan, choice: CallChoice, origin: str) -> None:
    possible = bool(choice.options) and all(option.calls for option in choice.options)
    _require(possible, origin, "a choice has no options, or one that does nothing")
    for option in choice.options:
        for call in option.calls:
            _check_call(plan, call, origin)
    written = {frozenset(_written(plan, option.calls)) for option in choice.options}
    _require(len(written) == 1, origin, f"the options of '{choice.label}' write different buffers")
    _require(
        not all(option.requires for option in choice.options),
        origin,
        f"no option of '{choice.label}' runs on every device",
    )


def _written(plan: ExecutionPlan, calls: Iterable[Call]) -> Iterable[tuple[int, int]]:
    """The places of tensors that others see written; in the arena, options may have scratch of their own."""
    for call in calls:
        for argument in call.args:
            if argument.writes and plan.buffers[argument.buffer].role not in (Role.ARENA, Role.FAULTS):
                yield argument.buffer, argument.offset


def _check_call(plan: ExecutionPlan, step: Call, origin: str) -> None:
    for argument in step.args:
        inside = 0 <= argument.buffer < len(plan.buffers)
        _require(inside, origin, f"step '{step.label}' binds buffer {argument.buffer} of {len(plan.buffers)}")
        buffer = plan.buffers[argument.buffer]
        size, kept = buffer.nbytes, buffer.role in (Role.INPUT, Role.WEIGHT)
        if argument.writes and kept:
            updated = buffer.role is Role.INPUT and any(source == buffer.name for _, source in plan.state)
            _require(updated, origin, f"step '{step.label}' writes to the {buffer.role.value} '{buffer.name}'")
        _require(0 <= argument.offset <= size, origin, f"step '{step.label}' binds past the end of its buffer")
        if argument.extension is not None:
            fault = argument.extension.fault(argument.offset, size)
            _require(not fault, origin, f"step '{step.label}' {fault}")
    if isinstance(step, KernelCall):
        _require(0 <= step.kernel < len(plan.kernels), origin, f"step '{step.label}' launches a missing kernel")
        _require(min(*step.grid, *step.block) >= 1, origin, f"step '{step.label}' launches an empty grid")
        _require(
            max(step.grid) < 1 << 31 and prod(step.block) <= _MAX_THREADS,
            origin,
            f"step '{step.label}' launches too much",
        )
        _require(prod(step.grid) <= _MAX_GROUPS, origin, f"step '{step.label}' launches too much")
        _require(0 <= step.shared_bytes <= _MAX_SHARED, origin, f"step '{step.label}' shares an impossible size")
        _require(len(step.params) <= _MAX_PARAMS, origin, f"step '{step.label}' has {len(step.params)} parameter bytes")
        if step.extension is not None:
            fault = step.extension.fault(step.grid, step.block)
            _require(not fault, origin, f"step '{step.label}' {fault}")
