"""Which inputs of a model's linears matter: scales found on a text, and moved into what stands before.

A weight's columns are multiplied by scales before they are rounded, and their inputs divided by them, which changes
nothing but where rounding errs: Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). Inputs are divided in
what makes them, the weight of a norm or the rows of a linear. Which module that is nobody needs to name: those that
come into question are tried with powers of two, and one is it where the model's logits stay as they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from npu_compiler.frontend.checkpoints.form import Array

__all__ = ["Calibration", "Seen", "calibrate", "logits_of", "observe"]

Rounding = Callable[[Array, Array], Array]
"""Rounds a weight [rows, columns], float32, given how much an error in each column counts; gives what is left."""

_SAMPLES = 256  # rows of inputs that are kept of a layer
_POWERS = tuple(step / 10 for step in range(11))  # of the inputs' magnitudes that are tried
_TRIAL = 16  # tokens
_SAME = 1e-3  # of the largest logit
_BEFORE = 6  # linears ahead of one that may make its inputs


@dataclass
class Seen:
    """The inputs of a layer on a text.

    Attributes:
        mean: float32 [columns], of their magnitudes.
        square: float32 [columns], of their squares.
        sample: float32 [rows, columns], some of them.
    """

    mean: torch.Tensor
    square: torch.Tensor
    sample: torch.Tensor

    def divided(self, scales: torch.Tensor) -> Seen:
        return Seen(self.mean / scales, self.square / scales.square(), self.sample / scales)

    def error(self, weight: Array, rounded: Array) -> float:
        """The norm of the difference of the layer's outputs over their norm."""
        own, made = (self.sample @ torch.from_numpy(each).T for each in (weight, rounded))
        norm = float(own.norm())
        return float((made - own).norm()) / norm if norm else 0.0


@dataclass(frozen=True)
class Calibration:
    """What a text tells of a model.

    Attributes:
        seen: The inputs of each linear, as they are once tensors are changed.
        changed: float32, what becomes of tensors before they are rounded or stored, by name.
    """

    seen: Mapping[str, Seen]
    changed: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class _Fold:
    """Linears that share an input, and what makes it: a norm's weight, or a linear's rows.

    Each element that the source makes meets `repeats` columns; `head` neighbours repeat together.
    """

    source: str
    targets: tuple[str, ...]
    repeats: int = 1
    head: int = 1

    @property
    def pattern(self) -> str:
        return re.sub(r"\d+", "*", " ".join((self.source, *self.targets)))

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales of what the source makes, for the columns of the targets."""
        return scales.reshape(-1, 1, self.head).expand(-1, self.repeats, -1).reshape(-1)

    def gathered(self, columns: torch.Tensor) -> torch.Tensor:
        """The inverse, of means."""
        return columns.reshape(-1, self.repeats, self.head).mean(1).reshape(-1)


def logits_of(model: Any, rows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """float32 [tokens, vocabulary] of each row of tokens."""
    for tokens in rows:
        with torch.no_grad():
            yield model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def calibrate(model: Any, rows: Sequence[Sequence[int]], roundings: Mapping[str, Rounding]) -> Calibration:
    """Finds scales for the inputs of linears, and changes the model by them.

    Args:
        model: A causal language model in float32, whose weights are changed.
        rows: Tokens of the text.
        roundings: How the weight of each linear is rounded; others are left alone.
    """
    seen, folds = observe(model, rows)
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items() if parameter.ndim == 1}
    known: dict[str, bool] = {}
    done: set[str] = set()
    touched: set[str] = set()
    for fold in folds:
        if not set(fold.targets) <= set(roundings) or done.intersection(fold.targets):
            continue
        if fold.pattern not in known:
            known[fold.pattern] = _is_neutral(model, fold, rows[0][:_TRIAL])
        if not known[fold.pattern]:
            continue
        done.update(fold.targets)
        scales = _best(fold, parameters, seen, roundings)
        if scales is not None:
            exact = _apply(fold, parameters, scales, before)
            touched.update(_parameters_of(fold, parameters))
            for target in fold.targets:
                seen[target] = seen[target].divided(fold.spread(exact))
    return Calibration(seen, {name: parameters[name].detach().numpy() for name in sorted(touched)})


def observe(model: Any, rows: Sequence[Sequence[int]]) -> tuple[dict[str, Seen], list[_Fold]]:
    """The inputs of each linear on a text, and what may make them."""
    looks = _Looks(max(1, _SAMPLES // len(rows)))
    hooks = [
        module.register_forward_hook(looks.hook(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        for _ in logits_of(model, rows):
            looks.is_first = False
    finally:
        for each in hooks:
            each.remove()
    order = list(looks.shared)
    return {name: looks.seen(name) for name in order}, list(_folds(model, order, looks.shared, looks.makers))


class _Looks:
    """What hooks see of the inputs of linears.

    Attributes:
        is_first: Whether this is the first row of tokens.
        shared: The input of each linear, in the order in which they run.
        makers: What norms gave, and their names.
    """

    def __init__(self, samples: int) -> None:
        self.is_first = True
        self.shared: dict[str, torch.Tensor] = {}
        self.makers: list[tuple[torch.Tensor, str]] = []
        self._samples = samples
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._parts: dict[str, list[torch.Tensor]] = {}

    def hook(self, name: str) -> Callable[..., None]:
        def look(module: torch.nn.Module, args: Any, output: Any) -> None:
            weight = getattr(module, "weight", None)
            if isinstance(module, torch.nn.Linear):
                self._take(name, args[0])
            elif self.is_first and isinstance(output, torch.Tensor) and getattr(weight, "ndim", 0) == 1:
                self.makers.append((output, name))

        return look

    def _take(self, name: str, given: torch.Tensor) -> None:
        if self.is_first:
            self.shared[name] = given
        rows = given.detach().reshape(-1, given.shape[-1]).float()
        added = rows.abs().sum(0), rows.square().sum(0), torch.tensor(len(rows))
        old = self._sums.get(name)
        self._sums[name] = [*added] if old is None else [a + b for a, b in zip(old, added, strict=True)]
        step = max(1, len(rows) // self._samples)
        self._parts.setdefault(name, []).append(rows[::step][: self._samples].clone())

    def seen(self, name: str) -> Seen:
        magnitudes, squares, count = self._sums[name]
        return Seen(magnitudes / count, squares / count, torch.cat(self._parts[name]))


def _folds(
    model: Any, order: Sequence[str], shared: Mapping[str, torch.Tensor], makers: Sequence[tuple[torch.Tensor, str]]
) -> Iterator[_Fold]:
    """What may make the input of each group of linears, the likeliest first."""
    grouped: list[list[str]] = []
    for name in order:
        if grouped and shared[grouped[-1][0]] is shared[name]:
            grouped[-1].append(name)
        else:
            grouped.append([name])
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for targets in grouped:
        norm = next((name for output, name in makers if output is shared[targets[0]]), None)
        if norm is not None:
            yield _Fold(norm, tuple(targets))
            continue
        columns, place = model.get_submodule(targets[0]).in_features, order.index(targets[0])
        for name in reversed(order[max(0, place - _BEFORE) : place]):
            outputs = model.get_submodule(name).out_features
            repeats = columns // outputs
            if columns == outputs:
                yield _Fold(name, tuple(targets))
            elif repeats and columns % outputs == 0 and outputs % head == 0:
                yield _Fold(name, tuple(targets), repeats, head)


def _parameters_of(fold: _Fold, parameters: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that a fold changes."""
    names = [f"{fold.source}.weight", f"{fold.source}.bias", *(f"{target}.weight" for target in fold.targets)]
    return [name for name in names if name in parameters]


def _scale(fold: _Fold, parameters: Mapping[str, Any], scales: torch.Tensor) -> None:
    with torch.no_grad():
        for name in _parameters_of(fold, parameters)[: -len(fold.targets)]:
            parameter = parameters[name]
            parameter.div_(scales if parameter.ndim == 1 else scales[:, None])
        for target in fold.targets:
            parameters[f"{target}.weight"].mul_(fold.spread(scales))


def _is_neutral(model: Any, fold: _Fold, tokens: Sequence[int]) -> bool:
    """Whether scales change nothing; powers of two, so that they can be taken back to the last bit."""
    parameters = dict(model.named_parameters())
    size = parameters[f"{fold.source}.weight"].shape[0]
    random = torch.Generator().manual_seed(0)
    scales = torch.exp2(torch.randint(-1, 2, (size,), generator=random).float())
    (own,) = logits_of(model, [tokens])
    _scale(fold, parameters, scales)
    (made,) = logits_of(model, [tokens])
    _scale(fold, parameters, 1 / scales)
    return bool((made - own).abs().max() <= _SAME * own.abs().max())


def _best(
    fold: _Fold, parameters: Mapping[str, Any], seen: Mapping[str, Seen], roundings: Mapping[str, Rounding]
) -> torch.Tensor | None:
    """The scales with the least error in the targets' outputs; None where it is least without any."""
    inputs = seen[fold.targets[0]]
    magnitudes = fold.gathered(inputs.mean).clamp(min=1e-4)
    least, best = np.inf, None
    for power in _POWERS:
        scales = magnitudes**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        columns = fold.spread(scales)
        own = inputs.divided(columns)
        error = 0.0
        for target in fold.targets:
            weight = (parameters[f"{target}.weight"].detach() * columns).numpy()
            off = torch.from_numpy(roundings[target](weight, own.square.numpy()) - weight)
            error += float((own.sample @ off.T).square().sum())
        if error < least:
            least, best = error, scales if power else None
    return best


def _apply(
    fold: _Fold, parameters: Mapping[str, Any], scales: torch.Tensor, before: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Changes the model by scales; a norm's weight is rounded to what it is stored in, and the scales are by that."""
    weight = parameters[f"{fold.source}.weight"]
    if weight.ndim == 1:
        stored = (weight.detach() / scales).to(torch.bfloat16).float()
        usable = (stored != 0) & torch.isfinite(stored)
        scales = torch.where(usable, before[f"{fold.source}.weight"] / stored, torch.ones_like(scales))
    _scale(fold, parameters, scales)
    return scales
