"""What an importer of a format is, and which one a checkpoint's configuration asks for."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from npu_compiler.errors import ExtractionError, NPUError
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.tensors import Tensors

__all__ = ["MOST_LAYERS", "Config", "Importer", "describing", "group_size", "number", "option", "skips"]

Config = Mapping[str, Any]
MOST_LAYERS = 1 << 12
"""Of a model: transformers makes lists of as many as a configuration says."""


class Importer(ABC):
    """A format of quantised weights.

    Attributes:
        default_dtype: What a model computes in whose configuration does not say.
    """

    default_dtype = "float16"

    @abstractmethod
    def __init__(self, config: Config) -> None:
        """Takes the part of the model's configuration that describes the format.

        Raises:
            ExtractionError: It describes what no weight can be brought from to `CodedMatrix`.
        """

    @abstractmethod
    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        """The weight of a linear or an embedding; None where the checkpoint has it as plain numbers.

        Args:
            module: The module's path.
            shape: Of the weight, [rows, columns].
            tensors: The checkpoint's.

        Raises:
            ExtractionError: Tensors are missing or do not fit; it names the tensor, what was found and expected.
        """

    def experts(self, name: str, shape: tuple[int, int, int], tensors: Tensors) -> CodedMatrix | None:
        """The matrices of a mixture of experts; None where the checkpoint has them as plain numbers.

        Args:
            name: The parameter's path.
            shape: Of the parameter, [experts, inputs, outputs].
            tensors: The checkpoint's.

        Returns:
            [experts, outputs * inputs].

        Raises:
            ExtractionError: As `matrix`.
        """
        return None

    def activations(self, module: str) -> str | None:
        """What the input of a linear is rounded to while the model runs: ``fp8`` or ``int8``; None for nothing."""
        return None


@contextmanager
def describing(what: str) -> Iterator[None]:
    """Reads what a file says of itself: types and values that nothing was prepared for are the file's fault.

    Args:
        what: It is about, for messages.

    Raises:
        ExtractionError: In the place of what Python, numpy or another library raises for them.
    """
    try:
        yield
    except NPUError:
        raise
    except Exception as error:  # transformers raises what its own dependencies do
        raise ExtractionError(
            f"{what}: the checkpoint describes it by unexpected types or values ({type(error).__name__}: {error}); "
            "download it again"
        ) from error


def option(config: Config, key: str, allowed: Iterable[Any], default: Any = None) -> Any:
    """A value of the configuration that must be one of a few."""
    value = config.get(key, default)
    known = list(allowed)
    if value not in known:
        raise ExtractionError(
            f"given {key}={value!r} in the quantisation's configuration, expected {' or '.join(map(repr, known))}"
        )
    return value


def number(config: Config, key: str, low: int, high: int, default: Any = None) -> int:
    """A whole number of the configuration within bounds, both included."""
    value = config.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise ExtractionError(f"given {key}={value!r} in the quantisation's configuration, expected {low} to {high}")
    return value


def group_size(name: str, given: int, columns: int) -> int:
    """How many columns share a scale; -1 in a configuration stands for all of them.

    Raises:
        ExtractionError: The groups do not divide the columns.
    """
    group = columns if given == -1 else given
    if group < 1 or columns % group:
        raise ExtractionError(f"'{name}': given groups of {given}, expected a divisor of its {columns} columns")
    return group


def skips(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module is among those that a configuration leaves alone: by its path, a part of it, or ``re:``."""
    wanted = list(patterns)

    def asked(module: str) -> bool:
        for pattern in wanted:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module):
                    return True
            elif module == pattern or module.startswith(pattern + ".") or f".{pattern}." in f".{module}.":
                return True
        return False

    return asked
