"""What a launch may read before it waits for the ones ahead of it."""

from __future__ import annotations

from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.plan import KernelSource
from npu_compiler.codegen.target import Choice, Launch, Lowering, Option

BUFFER = -1


def launch(writes: bool = False, hurries: bool = False) -> Launch:
    """One that binds the buffer, or writes it."""
    kernel = KernelSource("kernel", "")
    return Launch("", kernel, (TensorArg(BUFFER, writes=writes),), b"", (1, 1, 1), (1, 1, 1), hurries=hurries)


def is_settled(*emitted: Launch | Choice) -> bool:
    return Lowering([], emitted=[*emitted]).is_settled(BUFFER)


def test_what_the_launch_ahead_writes_is_not_settled() -> None:
    assert not is_settled(launch(writes=True))


def test_a_launch_that_waits_before_the_next_begins_settles_what_is_ahead_of_it() -> None:
    assert is_settled(launch(writes=True), launch())
    assert is_settled(launch(writes=True), launch(hurries=True), launch(), launch(hurries=True))


def test_launches_that_hurry_settle_nothing() -> None:
    assert not is_settled(launch(writes=True), launch(hurries=True), launch(hurries=True))
    assert not is_settled(launch(), launch(writes=True), launch(hurries=True))


def test_a_choice_settles_what_each_of_its_options_does() -> None:
    waits, hurries = Option("sm_90", (launch(),)), Option("", (launch(hurries=True),))
    assert not is_settled(launch(writes=True), Choice((waits, hurries)))
    assert is_settled(launch(writes=True), Choice((waits, Option("", (launch(hurries=True), launch())))))
    assert not is_settled(launch(), Choice((Option("", (launch(writes=True),)),)))
