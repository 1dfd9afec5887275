"""How the tokens of a batch are to be chosen, in numpy and float64: what `lane_tokens` is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.integers import ceil_div
from npu_text.batching.engine import LaneSampling
from npu_text.sampling import Sampling

__all__ = ["HOSTILE_LIMITS", "HOSTILE_TOP_K", "Wanted", "allowed_bits", "check_hostile", "limits_of", "philox"]
__all__ += ["lane_of", "probabilities", "random_words", "wanted"]

_WORD = (1 << 32) - 1
_ONE = 1 << 40
_DEPTH = 28.0
_NEAR = 1e-5  # of all weight: nearer to another token, rounding decides

HOSTILE_LIMITS = np.array(
    [
        (-1, 0.9, 0),
        (np.nan, 0.9, 0),
        (np.inf, 0.9, 0),
        (1, np.nan, np.nan),
        (1, -1, -1),
        (1, -np.inf, 2),
        (1e-45, 0.5, 0),
    ],
    np.float32,
)
"""Limits of draws as no request has them, with `HOSTILE_TOP_K`."""

HOSTILE_TOP_K = np.array([-5, 0, 7, 1 << 62, -(1 << 63), 3, 0])
_LEAVE_THE_LIKELIEST = [0, 1, 2, 4, 5]


class Wanted(NamedTuple):
    """A choice.

    Attributes:
        token: Which.
        margin: By what share of all weight the random number is away from another token.
        limit_margin: By what share a limit is away from one that keeps another number of tokens: of all weight, or,
            where it is one of a token's weight, of the likeliest's.
    """

    token: int
    margin: float
    limit_margin: float

    def is_met_by(self, token: int) -> bool:
        """Whether a token is that one, or rounding decides."""
        return token == self.token or min(self.margin, self.limit_margin) < _NEAR


def limits_of(samplings: Sequence[LaneSampling]) -> NDArray[np.float32]:
    """What `npu_tokens.draw` is to keep to, float32 [R, 3]."""
    return np.array([(1 / s.temperature if s.temperature else 0, s.top_p, s.min_p) for s in samplings], np.float32)


def lane_of(sampling: Sampling) -> LaneSampling:
    """How a server is to choose what a text's sampling chooses."""
    return LaneSampling(**{name: value for name, value in vars(sampling).items() if value is not None})


def check_hostile(tokens: NDArray[np.int64], logits: NDArray[Any]) -> None:
    """Checks what was drawn from logits [R, V] within hostile limits."""
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    assert (tokens == logits.argmax(axis=1))[_LEAVE_THE_LIKELIEST].all(), "what is left of the likeliest"


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of four words and two, with arithmetic of any width."""
    c, k = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            products[1] >> 32 ^ c[1] ^ k[0],
            products[1] & _WORD,
            products[0] >> 32 ^ c[3] ^ k[1],
            products[0] & _WORD,
        ]
        k = [(word + step) & _WORD for word, step in zip(k, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return c[0], c[1], c[2], c[3]


def random_words(seed: int, position: int) -> tuple[int, int]:
    """Those of `npu_tokens.random_words`."""
    words = philox((position & _WORD, position >> 32 & _WORD, 0, 0), (seed & _WORD, seed >> 32 & _WORD))
    return words[0], words[1]


def allowed_bits(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The mask [ceil(V / 32)] of tokens [V]."""
    padded = np.zeros(ceil_div(len(allowed), 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def _adjusted(
    logits: NDArray[Any], sampling: LaneSampling, prompt: Sequence[int], text: Sequence[int], mask: NDArray[Any] | None
) -> NDArray[np.float64]:
    """Logits with bias, mask and penalties."""
    result = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        result[token] += np.float32(bias)
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(result)]
        result[bits == 0] = -np.inf
    known = sorted({*prompt, *text})
    repetition = float(np.float32(sampling.repetition_penalty))
    result[known] = np.where(result[known] > 0, result[known] / repetition, result[known] * repetition)
    for token, count in Counter(text).items():
        result[token] -= float(np.float32(sampling.presence_penalty))
        result[token] -= count * float(np.float32(sampling.frequency_penalty))
    return result


class _Order(NamedTuple):
    """Tokens by their logits, of equal ones the first before the others.

    Attributes:
        tokens: All of them.
        ends: What each and those before it weigh.
        kept: What those that the limits allow weigh.
        limit_margin: As in `Wanted`.
    """

    tokens: NDArray[np.intp]
    ends: list[int]
    kept: int
    limit_margin: float

    def weights_by_number(self) -> NDArray[np.int64]:
        """What each token weighs, 0 where the limits do not allow it."""
        ends = np.minimum(np.array(self.ends), self.kept)
        result = np.zeros(len(ends), np.int64)
        result[self.tokens] = np.diff(ends, prepend=0)
        return result


def _ordered(logits: NDArray[np.float64], sampling: LaneSampling) -> _Order:
    exponents = (logits - logits.max()) / sampling.temperature
    shares = np.where(exponents > -_DEPTH, np.exp(exponents), 0.0)
    tokens = np.argsort(-logits, kind="stable")
    weights = np.floor(shares[tokens] * _ONE).astype(np.int64)
    ends = weights.cumsum().tolist()
    kept, margins = ends[min(sampling.top_k or len(ends), len(ends)) - 1], [1.0]
    if sampling.top_p < 1:
        wanted = max(kept * int(np.float64(np.float32(sampling.top_p)) * 2.0**32) >> 32, 1)
        kept = ends[int(np.searchsorted(ends, wanted))]
        margins += [abs(wanted - end) / ends[-1] for end in ends]
    if sampling.min_p > 0:
        least = int(np.float64(np.float32(sampling.min_p)) * _ONE)
        kept = min(kept, int(weights[weights >= least].sum()))
        # Those of the highest logit weigh exactly one, however an exponential rounds.
        margins += (np.abs(weights - least)[logits[tokens] < logits.max()] / _ONE).tolist()
    return _Order(tokens, ends, kept, min(margins))


def probabilities(logits: NDArray[Any], sampling: LaneSampling) -> NDArray[np.float64]:
    """How likely each token is to be chosen, without bias, mask and penalties."""
    order = _ordered(logits.astype(np.float64), sampling)
    return order.weights_by_number() / order.kept


def wanted(
    logits: NDArray[Any],
    sampling: LaneSampling,
    position: int,
    prompt: Sequence[int] = (),
    text: Sequence[int] = (),
    mask: NDArray[Any] | None = None,
) -> Wanted:
    """The choice for logits [V]; its token is -1 where the highest is no finite number."""
    adjusted = _adjusted(logits, sampling, prompt, text, mask)
    highest = adjusted.max()
    if not np.isfinite(highest):
        return Wanted(-1, 1.0, 1.0)
    if sampling.temperature == 0:
        second = np.partition(adjusted, -2)[-2] if len(adjusted) > 1 else -np.inf
        return Wanted(int(adjusted.argmax()), 1.0 if second in (highest, -np.inf) else float(highest - second), 1.0)
    order = _ordered(adjusted, sampling)
    high, low = random_words(sampling.seed, position)
    target = order.kept * (high << 32 | low) >> 64
    ends = order.weights_by_number().cumsum().tolist()
    place = int(np.searchsorted(ends, target, "right"))
    before, whole = ends[place - 1] if place else 0, float(order.ends[-1])
    margin = min(target - before if place else whole, ends[place] - target) / whole
    return Wanted(place, margin, order.limit_margin)
