"""What a launch may read before it waits for the ones ahead of it."""

from __future__ import annotations

from cuda_compiler import early_launches
from cuda_compiler.early_launches import kernel_number
from npu_compiler.artifact.plan import Argument, CallChoice, CallOption, KernelCall, KernelSource, Step
from npu_compiler.lowering.target import Lowering

BUFFER = -1
LOWERING = Lowering([])
PATIENT = kernel_number(KernelSource("patient", ""), LOWERING)
HURRYING = kernel_number(KernelSource("hurrying", ""), LOWERING, hurries=True)


def launch(writes: bool = False, kernel: int = PATIENT) -> KernelCall:
    """One that binds the buffer, or writes it."""
    return KernelCall("", kernel, (Argument(BUFFER, writes=writes),), b"", (1, 1, 1), (1, 1, 1))


def is_settled(*steps: Step) -> bool:
    LOWERING.emitted = [*steps]
    return early_launches.is_settled(BUFFER, LOWERING)


def test_what_the_launch_ahead_writes_is_not_settled() -> None:
    assert not is_settled(launch(writes=True))


def test_a_launch_that_waits_before_the_next_begins_settles_what_is_ahead_of_it() -> None:
    assert is_settled(launch(writes=True), launch())
    assert is_settled(launch(writes=True), launch(kernel=HURRYING), launch(), launch(kernel=HURRYING))


def test_launches_that_hurry_settle_nothing() -> None:
    assert not is_settled(launch(writes=True), launch(kernel=HURRYING), launch(kernel=HURRYING))
    assert not is_settled(launch(), launch(writes=True), launch(kernel=HURRYING))


def test_a_choice_settles_what_each_of_its_options_does() -> None:
    waits, hurries = CallOption("sm_90", (launch(),)), CallOption("", (launch(kernel=HURRYING),))
    assert not is_settled(launch(writes=True), CallChoice((waits, hurries)))
    both = CallOption("", (launch(kernel=HURRYING), launch()))
    assert is_settled(launch(writes=True), CallChoice((waits, both)))
    assert not is_settled(launch(), CallChoice((CallOption("", (launch(writes=True),)),)))
