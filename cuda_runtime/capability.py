"""What a device offers: the architecture that kernels are compiled for, and the options that it can run."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from cuda_compiler.artifact.vocabulary import LIBRARY, architecture, read_architecture
from cuda_runtime.library import is_installed
from npu_compiler.artifact.plan import CallChoice, CallOption, KernelCall
from npu_compiler.errors import DeviceError

__all__ = ["architecture_name", "filled_share", "fitting_options", "meets"]

_RESERVED_BYTES = 1 << 10  # of shared memory, for each block
_WITH_EXTENSIONS = frozenset({90})  # instructions that no later capability has belong to an architecture of its own


def architecture_name(capability: int) -> str:
    """What the compiler calls the architecture of a device; `capability` is its compute capability times ten."""
    return architecture(capability, exactly=capability in _WITH_EXTENSIONS)


def meets(requires: str, capability: int) -> bool:
    """Whether a device can run an option.

    Args:
        requires: Empty for any device, ``sm_80`` for compute capability 8.0 and up, ``sm_90a`` for exactly 9.0,
            ``cublas`` where that library is installed.
        capability: The device's compute capability times ten.

    Raises:
        DeviceError: The requirement is none of these.
    """
    if not requires:
        return True
    if requires == LIBRARY:
        return is_installed()
    found = read_architecture(requires)
    if found is None:
        raise DeviceError(
            f"an option requires '{requires}', expected nothing, '{LIBRARY}' or an architecture such as 'sm_80' or "
            "'sm_90a'; compile the model with this release"
        )
    return capability == found.capability if found.exactly else capability >= found.capability


def fitting_options(choice: CallChoice, capability: int) -> list[int]:
    """The options of a choice that a device can run, the preferred one first.

    Raises:
        DeviceError: As `meets` does.
    """
    return [index for index, option in enumerate(choice.options) if meets(option.requires, capability)]


def filled_share(option: CallOption, attributes: Mapping[str, int]) -> float:
    """How much of a device an option's largest launch fills, from 0 to 1, by its blocks' threads and shared memory.

    Args:
        option: The option.
        attributes: Of the device, by CuPy's names for them.
    """
    whole = attributes["MultiProcessorCount"]
    launches = [call for call in option.calls if isinstance(call, KernelCall)]
    return min(1.0, max((_filled(call, attributes) / whole for call in launches), default=1.0))


def _filled(call: KernelCall, attributes: Mapping[str, int]) -> float:
    """Multiprocessors that a launch fills."""
    threads = prod(call.block) / attributes["MaxThreadsPerMultiProcessor"]
    memory = (call.shared_bytes + _RESERVED_BYTES) / attributes["MaxSharedMemoryPerMultiprocessor"]
    return prod(call.grid) * max(threads, memory)
