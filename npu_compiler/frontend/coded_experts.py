"""Mixtures of experts whose matrices are codes.

transformers holds the matrices of all experts of a layer as one parameter [experts, inputs, outputs]. Few tokens, which
meet fewer experts than there are, take the codes of theirs; for many all are made into numbers, and tokens are grouped
by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_compiler.frontend.coded_layers import CodedWeight

__all__ = ["CodedExperts", "hold_codes"]


class CodedExperts(torch.nn.Module):
    """The matrices [experts, inputs, outputs] of a mixture; codes lie along inputs, and an expert is a row of codes."""

    def __init__(self, matrix: CodedWeight, shape: tuple[int, int, int]) -> None:
        """Args:
        matrix: [experts, outputs * inputs].
        shape: Of the parameter.
        """
        super().__init__()
        self.matrix, self._shape = matrix, shape

    def _in_place(self, numbers: torch.Tensor) -> torch.Tensor:
        _, inputs, outputs = self._shape
        return numbers.reshape(-1, outputs, inputs).transpose(1, 2)

    def forward(self) -> torch.Tensor:
        """All of them."""
        return self._in_place(self.matrix())

    def __getitem__(self, experts: torch.Tensor) -> torch.Tensor:
        """Those of some experts, int64 [S]: [S, inputs, outputs]."""
        return self._in_place(self.matrix.picked(experts))


def hold_codes(module: torch.nn.Module, coded: Mapping[str, CodedExperts]) -> None:
    """Lets a mixture of experts of transformers read codes in place of parameters.

    Args:
        module: The mixture.
        coded: By the name of the parameter, which is removed.
    """
    for name, matrices in coded.items():
        delattr(module, name)
        module.add_module(f"{name}_codes", matrices)
    kind = type(module)
    module.__class__ = type(kind.__name__, (_OfCodes, kind), {name: _matrices(name) for name in coded})


def _matrices(name: str) -> property:
    def read(self: Any) -> Any:
        matrices = getattr(self, f"{name}_codes")
        return matrices if self.picks else matrices()

    return property(read)


class _OfCodes:
    """A mixture of experts of transformers with matrices in codes.

    Attributes:
        picks: Whether the matrices are read by experts, not as a whole.
    """

    num_experts: int
    picks = False

    def forward(self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As that of `transformers`."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.picks = experts.numel() < self.num_experts
        products = ALL_EXPERTS_FUNCTIONS["batched_mm" if self.picks else "grouped_mm"]
        made: torch.Tensor = products(self, hidden_states, experts, weights)
        return made
