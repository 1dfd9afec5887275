"""Losses, as models compute them when they are evaluated. `reduction` is 0 for none, 1 for the mean, 2 for the sum."""

from __future__ import annotations

from functools import partial
from math import pi, prod

from npu_compiler.dtypes import FLOAT32
from npu_compiler.ops.indexing import gather
from npu_compiler.ops.normalization import log_softmax
from npu_compiler.ops.pointwise import log1p, xlogy
from npu_compiler.ops.reduction import total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, full, where

_MEAN, _SUM = 1, 2


loss = partial(op, work=Work.ROWS)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction not in (0, _MEAN, _SUM):
        raise OpRefusal(f"given reduction={reduction}, expected 0, 1 or 2")
    if reduction == 0:
        return losses
    count = prod(losses.shape)
    if reduction == _MEAN and not count:
        return full(losses.trace, (), float("nan"), losses.dtype)
    return reduce(losses, total, (), False, None, 1 / count if reduction == _MEAN else None)[0]


def _absolute(x: Tensor) -> Tensor:
    return apply("abs", x)


@loss("aten.mse_loss.default")
def mse_loss(self: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """The squared difference."""
    apart = self - target
    return _reduced(apart * apart, reduction)


@loss("aten.l1_loss.default")
def l1_loss(self: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """The magnitude of the difference."""
    return _reduced(_absolute(self - target), reduction)


@loss("aten.smooth_l1_loss.default")
def smooth_l1_loss(self: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """The magnitude of the difference less ``beta / 2``; below `beta` its square over ``2 * beta``."""
    apart = _absolute(self - target)
    far = apart - 0.5 * beta
    return _reduced(where(apart < beta, apart * apart * 0.5 / beta, far) if beta else far, reduction)


@loss("aten.huber_loss.default")
def huber_loss(self: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    """Half the squared difference; from `delta` on linear."""
    apart = _absolute(self - target)
    return _reduced(where(apart <= delta, apart * apart * 0.5, (apart - 0.5 * delta) * delta), reduction)


@loss("aten.soft_margin_loss.default")
def soft_margin_loss(self: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """``log(1 + e ** (-target * self))``."""
    return _reduced(_softplus(-(self * target)), reduction)


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + e ** x)``, which does not overflow."""
    return apply("max", x, 0.0) + log1p(apply("exp", -_absolute(x)))


@loss("aten.hinge_embedding_loss.default")
def hinge_embedding_loss(self: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _MEAN) -> Tensor:
    """`self` where the target is 1; what is left to the margin where it is -1."""
    near = where(apply("ne", target, -1), self, 0.0)
    return _reduced(near + where(apply("ne", target, 1), apply("max", margin - self, 0.0), 0.0), reduction)


@loss("aten.margin_ranking_loss.default")
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _MEAN
) -> Tensor:
    """``max(0, -target * (input1 - input2) + margin)``."""
    return _reduced(apply("max", -target * (input1 - input2) + margin, 0.0), reduction)


@loss("aten.poisson_nll_loss.default")
def poisson_nll_loss(input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int) -> Tensor:
    """The negative logarithm of the likelihood of counts, with Stirling's formula where `full`."""
    likely = (apply("exp", input), input) if log_input else (input, apply("log", input + eps))
    losses = likely[0] - target * likely[1]
    if full:
        stirling = target * apply("log", target) - target + 0.5 * apply("log", 2 * pi * target)
        losses = losses + where(target <= 1, 0.0, stirling)
    return _reduced(losses, reduction)


@loss("aten.binary_cross_entropy.default")
def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """The cross entropy of probabilities; no logarithm is below -100."""
    ahead, behind = (apply("max", apply("log", x), -100.0) for x in (self, 1.0 - self))
    losses = (target - 1.0) * behind - target * ahead
    return _reduced(losses if weight is None else losses * weight, reduction)


@loss("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """The cross entropy of what a sigmoid makes probabilities."""
    behind = _softplus(-self)
    if pos_weight is not None:
        behind = behind * ((pos_weight - 1.0) * target + 1.0)
    losses = (1.0 - target) * self + behind
    return _reduced(losses if weight is None else losses * weight, reduction)


@loss("aten.kl_div.default")
def kl_div(self: Tensor, target: Tensor, reduction: int = _MEAN, log_target: bool = False) -> Tensor:
    """``target * (log(target) - self)``; with `log_target` the target is a logarithm already."""
    if log_target:
        return _reduced(apply("exp", target) * (target - self), reduction)
    return _reduced(xlogy(target, target) - target * self, reduction)


@loss("aten.nll_loss_nd.default")
def nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Tensor:
    """The negative logarithm, by the class of each target; the mean is weighted. `self` is [N, C, ...] or [C]."""
    return _of_classes(self, target, weight, reduction, ignore_index, 0.0)


@loss("aten.cross_entropy_loss.default")
def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of what a softmax makes probabilities, of classes [N, ...] or of probabilities [N, C, ...]."""
    logs = log_softmax(self.cast(FLOAT32), 1 if len(self.shape) > 1 else 0)
    if target.dtype.is_float:
        result = _of_probabilities(logs, target, weight, reduction, label_smoothing)
    else:
        result = _of_classes(logs, target, weight, reduction, ignore_index, label_smoothing)
    return result.cast(self.dtype)


def _along_classes(weight: Tensor, x: Tensor) -> Tensor:
    """Weights of classes, as a factor of logarithms of all classes."""
    return weight.reshape((-1, *(1,) * max(0, len(x.shape) - 2)))


def _of_classes(
    logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, smoothing: float
) -> Tensor:
    dim = 1 if len(logs.shape) > 1 else 0
    counts = apply("ne", target, ignored)
    place = where(counts, target, 0)
    at_class = place.reshape((*place.shape[:dim], 1, *place.shape[dim:]))
    losses = -gather(logs, dim, at_class).reshape(target.shape)
    weights = counts.cast(FLOAT32)
    if weight is not None:
        own = weight.gather(0, place)
        losses, weights = losses * own, weights * own
    if smoothing:
        all_logs = logs if weight is None else logs * _along_classes(weight, logs)
        (spread,) = reduce(all_logs, total, (dim,), False, FLOAT32)
        losses = losses * (1 - smoothing) - spread * (smoothing / logs.shape[dim])
    losses = where(counts, losses, 0.0)
    if reduction != _MEAN:
        return _reduced(losses, reduction).cast(logs.dtype)
    (whole,), (shares,) = (reduce(x, total, (), False, FLOAT32) for x in (losses, weights))
    return (whole / shares).cast(logs.dtype)


def _of_probabilities(logs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float) -> Tensor:
    dim = 1 if len(logs.shape) > 1 else 0
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logs.shape[dim]
    terms = logs * target
    if weight is not None:
        terms = terms * _along_classes(weight, logs)
    (losses,) = reduce(-terms, total, (dim,), False)
    return _reduced(losses, reduction)
