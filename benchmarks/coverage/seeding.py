"""Seeded weights in which no part of a model is without effect."""

from __future__ import annotations

import torch

__all__ = ["seed_weights"]

_SPREAD = 0.1
_BATCH = 4


def seed_weights(module: torch.nn.Module, inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
    """Makes a fresh model's weights such that an error in any part of it shows in its outputs.

    Constructors leave scales of one, offsets of zero, branches that are multiplied by zero, and statistics that no
    image has; a compiler could leave such parts out and nobody would see. So all elements of a constant parameter get
    noise, and BatchNorms the statistics of a few random inputs.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and _is_constant(parameter):
                parameter.add_(torch.randn_like(parameter), alpha=_SPREAD)
        norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
        norms = [part for part in norms if part.track_running_stats and not isinstance(part, torch.nn.SyncBatchNorm)]
        if norms and isinstance(inputs, tuple):
            _calibrate(module, norms, inputs)
    module.eval()


def _is_constant(parameter: torch.Tensor) -> bool:
    return parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())


def _calibrate(
    module: torch.nn.Module, norms: list[torch.nn.modules.batchnorm._BatchNorm], inputs: tuple[torch.Tensor, ...]
) -> None:
    module.eval()
    for part in norms:
        part.momentum = None  # statistics are the plain mean over all passes
        part.train()
    module(*(torch.randn(_BATCH, *tensor.shape[1:]) for tensor in inputs))
