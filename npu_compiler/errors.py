"""The project's exceptions: one small tree.

Every message says what was given, what was expected and what to do. Catch `NPUError` for all of
them. A class exists only where a caller would react differently.
"""

from __future__ import annotations

__all__ = [
    "NPUError",
    "IRError",
    "UnsupportedOpError",
    "CompileError",
    "ExtractionError",
    "ProgramFormatError",
    "TargetMismatchError",
    "WeightError",
    "InputError",
    "DeviceError",
    "KernelCompileError",
    "ToolchainError",
    "OutOfMemoryError",
    "BusyError",
    "MissingDependencyError",
]


class NPUError(Exception):
    """Base of every error this project raises on purpose."""


class IRError(NPUError):
    """The IR is not JSON, has another schema, or contradicts itself."""


class UnsupportedOpError(NPUError):
    """An op, or an attribute of one, that the target cannot compute.

    Attributes:
        node: Name of the node.
        op: ATen name of the op, such as ``aten.special_i0e.default``.
        reason: The constraint that failed.
    """

    def __init__(self, node: str, op: str, reason: str) -> None:
        self.node, self.op, self.reason = node, op, reason
        super().__init__(
            f"node '{node}' ({op}): {reason}. Run such nodes on the CPU: npu_compiler.partition() and "
            "npu_runtime.DAGExecutor do it, and so does --partition of `npu run` and `npu generate`"
        )


class CompileError(NPUError):
    """A compile option is wrong, or a graph pass left a graph that does not verify."""


class ExtractionError(NPUError):
    """A `torch.nn.Module` could not be turned into IR."""


class ProgramFormatError(NPUError):
    """A ``.npubin`` is truncated, altered, of another version, or not a ``.npubin`` at all."""


class TargetMismatchError(NPUError):
    """A program compiled for one target was given to a device of another."""


class WeightError(NPUError):
    """A weight is missing, or has another shape or dtype than the program expects."""


class InputError(NPUError):
    """An input or an output was named, shaped or typed otherwise than the program expects."""


class DeviceError(NPUError):
    """The device refused a command, or does not exist."""


class OutOfMemoryError(DeviceError):
    """The device has less free memory than a program needs."""


class KernelCompileError(DeviceError):
    """The device's compiler refused a kernel; the message carries what it said."""


class ToolchainError(DeviceError):
    """The software GPU found no compiler it can use."""


class BusyError(NPUError):
    """More was asked for than can wait, or it waited for too long; asked for later, it may go well."""


class MissingDependencyError(NPUError):
    """A feature needs a package that is not installed; the message names the extra that has it."""
