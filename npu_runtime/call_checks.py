"""What a caller names: programs, their functions, and inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError

__all__ = [
    "check_input_names",
    "check_mapping",
    "check_output_names",
    "check_program_type",
    "choose_function",
    "names_of",
]


def check_input_names(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses inputs of which some are missing or not expected."""
    if given.keys() != expected.keys():
        missing, unknown = expected.keys() - given.keys(), given.keys() - expected.keys()
        raise InputError(
            f"given the inputs {names_of(given)}, expected {names_of(expected)}"
            + (f"; missing: {names_of(missing)}" if missing else "")
            + (f"; not expected: {names_of(unknown)}" if unknown else "")
        )


def check_output_names(asked: Collection[str], made: Collection[str]) -> None:
    """Refuses to give outputs that there are not."""
    for name in asked:
        if not isinstance(name, str) or name not in made:
            raise InputError(f"given the output {name!r:.60} to bring back, expected some of {names_of(made)}")


def check_program_type(program: object) -> None:
    """Refuses what is no compiled program, such as a path."""
    if not isinstance(program, CompiledProgram):
        raise InputError(
            f"given a {type(program).__name__} as program, expected a CompiledProgram; CompiledProgram.load(path) "
            "reads one and npu_compiler.compile(ir) makes one"
        )


def check_mapping(inputs: object, names: object) -> None:
    """Refuses what is no mapping of inputs by name; `names` are those expected."""
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"given a {type(inputs).__name__} as inputs, expected a mapping of names to buffers or arrays; "
            f"the inputs are {names_of(names)}"
        )


def choose_function(program: CompiledProgram, function: str | None) -> ExecutionPlan:
    """The plan of a program's function; of ``main``, or of the only one, where no name is given.

    Raises:
        InputError: The program has no such function.
    """
    if function is None:
        return program.main
    if not isinstance(function, str) or function not in program.functions:
        raise InputError(f"given the function {function!r:.60}, expected one of {names_of(program.functions)}")
    return program.functions[function]


def names_of(names: object) -> str:
    """Names as a message lists them."""
    return ", ".join(f"'{name}'" for name in sorted(map(str, names))) or "none"  # type: ignore[call-overload]
