"""What the catalogue holds: a model that can be built by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Absent", "Built", "Entry"]


class Absent(Exception):
    """The installed version of a library does not have the model."""


@dataclass(frozen=True)
class Built:
    """A model and what it is called with.

    Attributes:
        module: In eval mode, float32, as its constructor leaves it.
        inputs: Keyword arguments of its `forward`; or positional ones, by number.
    """

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: ``source/model``, as `--only` matches it.
        kind: What it is for: ``classification``, ``segmentation``, ``detection``, ``text``, ``speech`` and so on.
        build: Makes it; raises `Absent` where the library is older or newer than the model.
        classes: Whether its output is a row of scores, whose best has to be the same.
    """

    name: str
    kind: str
    build: Callable[[], Built]
    classes: bool = False

    @property
    def source(self) -> str:
        return self.name.partition("/")[0]
