"""What a device offers: the architecture that kernels are compiled for, and the options that it can run."""

from __future__ import annotations

from cuda_compiler.artifact.vocabulary import LIBRARY, architecture, read_architecture
from cuda_runtime.library import is_installed
from npu_compiler.artifact.plan import CallChoice
from npu_compiler.errors import DeviceError

__all__ = ["architecture_name", "fitting_options", "meets"]

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
