"""The memory plan: nothing that lives at one time shares a byte, and sharing never costs more than not sharing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.artifact.memory import ALIGNMENT, Lifetime, plan_arena
from npu_compiler.integers import ceil_div

_LIVES = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)),
    max_size=24,
).map(lambda items: [Lifetime(i, size, start, start + length) for i, (size, start, length) in enumerate(items)])


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


@given(_LIVES)
def test_buffers_that_live_together_do_not_overlap(lives: list[Lifetime]) -> None:
    offsets, size = plan_arena(lives)
    for life in lives:
        assert offsets[life.key] % ALIGNMENT == 0
        assert 0 <= offsets[life.key] <= offsets[life.key] + life.nbytes <= size
    for i, a in enumerate(lives):
        for b in lives[:i]:
            together = a.start <= b.end and b.start <= a.end
            apart = offsets[a.key] + a.nbytes <= offsets[b.key] or offsets[b.key] + b.nbytes <= offsets[a.key]
            assert apart or not together or not (a.nbytes and b.nbytes)


@given(_LIVES)
def test_the_arena_holds_what_lives_at_once_and_no_more_than_everything(lives: list[Lifetime]) -> None:
    _, size = plan_arena(lives)
    at_once = [sum(_aligned(life.nbytes) for life in lives if life.start <= step <= life.end) for step in range(20)]
    assert max(at_once) <= size <= sum(_aligned(life.nbytes) for life in lives)


def test_a_chain_needs_two_buffers() -> None:
    lives = [Lifetime(i, 1024, i, i + 1) for i in range(50)]
    assert plan_arena(lives)[1] == 2048


@given(_LIVES, st.randoms())
def test_the_plan_does_not_depend_on_the_order_given(lives: list[Lifetime], random: object) -> None:
    shuffled = list(lives)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_arena(shuffled) == plan_arena(lives)


def test_buffers_of_one_size_are_placed_by_their_start_then_by_their_key() -> None:
    """Programs have the same bytes on every machine, so that ties are decided, and always alike."""
    lives = [Lifetime(0, 256, 2, 3), Lifetime(2, 256, 1, 3), Lifetime(1, 256, 1, 3), Lifetime(3, 512, 3, 3)]
    assert plan_arena(lives) == ({3: 0, 1: 512, 2: 768, 0: 1024}, 1280)


def test_of_gaps_of_one_size_the_first_is_taken() -> None:
    """At step 5, 1024 bytes are free on either side of the third."""
    lives = [
        Lifetime(0, 2816, 10, 10),
        Lifetime(1, 1024, 0, 0),
        Lifetime(2, 768, 0, 5),
        Lifetime(3, 512, 5, 10),
        Lifetime(4, 256, 5, 5),
    ]
    assert plan_arena(lives) == ({0: 0, 1: 0, 2: 1024, 3: 2816, 4: 0}, 3328)
