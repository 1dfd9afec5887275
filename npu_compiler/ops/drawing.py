"""Choices of tokens: masks and penalties, counted random numbers, draws by probability that leave out the unlikely."""

from __future__ import annotations

from npu_compiler.dtypes import FLOAT32, INT32, INT64
from npu_compiler.integers import ceil_div
from npu_compiler.ops.registry import elementwise, op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, where

__all__ = ["LONGEST_ROW", "allow", "draw", "penalise", "random_words"]

LONGEST_ROW = 1 << 22  # logits of which the weights' sum has fewer than 63 bits
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK_BITS = 32


@elementwise("npu_tokens.random_words.default", rows=None)
def random_words(seeds: Tensor, owners: Tensor, positions: Tensor) -> Tensor:
    """Two random words for each position of an owner of a seed, int64 [R, 2] from 0 to below two to the power of 32.

    They are the first two that Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) gives
    for the seed as its key and the position as its counter.

    Args:
        seeds: int64 [L], of which all 64 bits count.
        owners: int64 [R], whose seed each takes.
        positions: int64 [R], of which all 64 bits count.
    """
    kinds = {tensor.dtype for tensor in (seeds, owners, positions)}
    if kinds != {INT64} or len(seeds.shape) != 1 or len(owners.shape) != 1 or owners.shape != positions.shape:
        given = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (seeds, owners, positions))
        raise OpRefusal(f"given {given}, expected int64 [L], [R] and [R]")
    seed = seeds.gather(0, owners).reshape((*owners.shape, 1))
    position = positions.reshape((*positions.shape, 1))
    keys = [_low(seed), _low(apply("shr", seed, 32))]
    a, b = _low(position), _low(apply("shr", position, 32))
    c, d = a * 0, a * 0
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(a, _MULTIPLIERS[0]), _product(c, _MULTIPLIERS[1])
        a, b = apply("xor", apply("xor", high_c, b), keys[0]), low_c
        c, d = apply("xor", apply("xor", high_a, d), keys[1]), low_a
        keys = [_low(key + step) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return where(arange(seeds.trace, 2) < 1, a, b)


def _low(number: Tensor) -> Tensor:
    return apply("and", number, _WORD)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The two words of a product of words; nothing on the way has more than 49 bits."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + apply("shr", low, 16)
    return apply("shr", high, 16), apply("or", apply("shl", apply("and", high, 0xFFFF), 16), apply("and", low, 0xFFFF))


@elementwise("npu_tokens.allow.default", rows=None)
def allow(logits: Tensor, masks: Tensor) -> Tensor:
    """The logits of tokens that may be chosen, negative infinity for the others: float32 [R, V].

    Args:
        logits: Floating point [R, V].
        masks: int32 [R, ceil(V / 32)]; bit v % 32 of word v // 32 is set for tokens that may be chosen.
    """
    rows, vocabulary = logits.shape
    if masks.dtype != INT32 or masks.shape != (rows, ceil_div(vocabulary, _MASK_BITS)):
        raise OpRefusal(
            f"given masks {masks.dtype} {list(masks.shape)} for logits {list(logits.shape)}, expected int32 words of 32"
        )
    token = arange(logits.trace, vocabulary)
    word = masks.gather(1, apply("shr", token, 5))
    is_set = apply("ne", apply("and", apply("shr", word, apply("and", token, _MASK_BITS - 1).cast(INT32)), 1), 0)
    return where(is_set, logits.cast(FLOAT32), float("-inf"))


@elementwise("npu_tokens.penalise.default", rows=None)
def penalise(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Logits less what the text, and its prompt, make of them: float32 [R, V].

    Positive logits of known tokens are divided by the first penalty, negative ones multiplied; then the second is
    subtracted for tokens of the text, and the third as many times as the text has them.

    Args:
        logits: Floating point [R, V].
        counts: int32 [R, V]: twice how often the text has a token, and 1 more where the prompt has it.
        penalties: float32 [R, 3]: for repetition, presence and frequency.
    """
    rows = logits.shape[0]
    if counts.shape != logits.shape or counts.dtype != INT32 or penalties.shape != (rows, 3):
        given = f"{list(logits.shape)}, {counts.dtype} {list(counts.shape)} and {list(penalties.shape)}"
        raise OpRefusal(f"given {given}, expected [R, V], int32 [R, V] and [R, 3]")
    repetition, presence, frequency = (penalties.slice(1, number, 1) for number in range(3))
    value = logits.cast(FLOAT32)
    value = where(counts > 0, where(value > 0, value / repetition, value * repetition), value)
    times = apply("shr", counts, 1)
    return value - (where(times > 0, presence, 0.0) + times.cast(FLOAT32) * frequency)


@op("npu_tokens.draw.default", work=Work.ANCHOR)
def draw(logits: Tensor, limits: Tensor, top_k: Tensor, words: Tensor) -> Tensor:
    """A token of each row, drawn by probability: int64 [R]; -1 where the highest logit is no finite number.

    The weight of a token is ``exp((logit - highest) * inverse temperature)`` in units of two to the power of -40,
    rounded down. In the order of weight, of equal logits the first before the others, the first `top_k` tokens are
    kept; of these the fewest that have the share ``top_p`` of their weight; and of these the ones that have at least
    the share ``min_p`` of the first one's weight. Their weight times a random share of 64 bits, rounded down, is the
    most that those of a lower number than the drawn one weigh. All sums are of integers, so that it depends on no order
    of theirs.

    Args:
        logits: Floating point [R, V].
        limits: float32 [R, 3]: the inverse temperature, finite, 0 or less for the highest logit; ``top_p``, 1 or more
            for all; ``min_p``, 0 for all.
        top_k: int64 [R]; 0 for all.
        words: int64 [R, 2], as of `random_words`.
    """
    shapes = tuple(tensor.shape for tensor in (limits, top_k, words))
    if len(logits.shape) != 2 or shapes != ((logits.shape[0], 3), (logits.shape[0],), (logits.shape[0], 2)):
        given = ", ".join(str(list(shape)) for shape in (logits.shape, *shapes))
        raise OpRefusal(f"given {given}, expected [R, V], [R, 3], [R] and [R, 2]")
    if not logits.dtype.is_float or (limits.dtype, top_k.dtype, words.dtype) != (FLOAT32, INT64, INT64):
        given = f"{logits.dtype}, {limits.dtype}, {top_k.dtype} and {words.dtype}"
        raise OpRefusal(f"given {given}, expected floating point, float32, int64 and int64")
    if not 0 < logits.shape[1] <= LONGEST_ROW:
        raise OpRefusal(f"given rows of {logits.shape[1]} logits, expected 1 to {LONGEST_ROW}")
    return logits.trace.anchor("draw", (logits, limits, top_k, words), logits.shape[:1], INT64)
