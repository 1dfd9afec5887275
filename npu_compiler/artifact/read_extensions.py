"""Gives what a file holds for one target alone to that target's kinds to read."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from npu_compiler.artifact.codec import decode
from npu_compiler.artifact.extension import Extension, Unread, extensions_of
from npu_compiler.artifact.plan import Argument, Call, ExecutionPlan, KernelCall, change_calls, options_of
from npu_compiler.errors import ProgramFormatError

__all__ = ["read_extensions"]

_Kind = TypeVar("_Kind", bound=Extension)


def read_extensions(plan: ExecutionPlan, target: str, origin: str) -> ExecutionPlan:
    """The plan with extensions of the kinds that its target declares; as it is where it has none.

    Args:
        plan: As `decode` made it.
        target: The target that the file names.
        origin: Where it comes from, for error messages.

    Raises:
        ProgramFormatError: No installed package declares such extensions for the target, or they do not fit.
    """
    calls = [call for step in plan.steps for option in options_of(step) for call in option.calls]
    if not any(map(_is_extended, calls)):
        return plan
    declared = extensions_of(target, origin)

    def argument_read(argument: Argument) -> Argument:
        return replace(argument, extension=_read(argument.extension, declared.argument, origin))

    def call_read(call: Call) -> Call:
        if not _is_extended(call):
            return call
        call = replace(call, args=tuple(map(argument_read, call.args)))
        if isinstance(call, KernelCall):
            call = replace(call, extension=_read(call.extension, declared.launch, f"{origin}: step '{call.label}'"))
        return call

    return replace(plan, steps=tuple(change_calls(step, call_read) for step in plan.steps))


def _is_extended(call: Call) -> bool:
    own = isinstance(call, KernelCall) and call.extension is not None
    return own or any(argument.extension is not None for argument in call.args)


def _read(unread: Extension | None, kind: type[_Kind] | None, path: str) -> _Kind | None:
    if unread is None:
        return None
    if kind is None or not isinstance(unread, Unread):
        raise ProgramFormatError(f"{path}: it holds for its target what that target does not know; compile it again")
    found: _Kind = decode(kind, unread.data, path)
    return found
