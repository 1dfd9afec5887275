"""What a launch that begins early knows of those ahead, and what it makes of that."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.devices import DEVICES
from cuda_compiler.early_launches import kernel_number
from cuda_compiler.launches_ahead import Ahead, alone_bytes, launches_ahead, paced_blocks, spread_bytes
from npu_compiler.artifact.plan import CallChoice, CallOption, KernelCall, KernelSource
from npu_compiler.lowering.target import Lowering

H200 = DEVICES.named("sm_90", "cuda")
ATTENTION, GATE, DOWN = Ahead(16, 139_264, False), Ahead(132, 124_064, True), Ahead(96, 100_416, True)
LAUNCH = KernelCall("", 0, (), b"", (1, 1, 1), (1, 1, 1))


def test_the_latest_launches_are_told_as_new_devices_launch_them() -> None:
    beside = KernelCall("", 0, (), b"", (8, 1, 2), (32, 1, 1), shared_bytes=4096, extension=cluster_along_x(1, True))
    lowering = Lowering(
        [], emitted=[LAUNCH, CallChoice((CallOption("sm_90", (beside,)), CallOption("", (LAUNCH, LAUNCH))))]
    )
    assert launches_ahead(0, lowering) == (Ahead(1, 0, False), Ahead(16, 4096, True))
    lowering = Lowering([], emitted=[LAUNCH] * 9)
    assert len(launches_ahead(0, lowering)) == 5


def test_launches_that_stream_are_told() -> None:
    lowering = Lowering([])
    numbers = [kernel_number(KernelSource(name, ""), lowering, streams=name == "codes") for name in ("codes", "others")]
    lowering.emitted.extend(replace(LAUNCH, kernel=number) for number in numbers)
    assert [each.streams for each in launches_ahead(0, lowering)] == [True, False]


def test_blocks_that_wait_for_room_are_not_paced() -> None:
    assert paced_blocks((), 132, 124_064, H200) == H200.cores
    assert paced_blocks((ATTENTION, Ahead(96, 17_600, True)), 132, 124_064, H200) == H200.cores - 16
    assert paced_blocks((ATTENTION, Ahead(96, 17_600, True)), 132, 40_000, H200) == H200.cores
    assert paced_blocks((Ahead(96, 17_600, True), GATE), 132, 169_536, H200) == 0
    assert paced_blocks((ATTENTION, DOWN, DOWN), 132, 100_000, H200) == H200.cores  # attention has ended
    assert paced_blocks((), 96, 100_416, H200) == 96


def test_small_blocks_do_not_crowd_where_the_last_launch_has_none() -> None:
    spread = spread_bytes((ATTENTION, GATE, DOWN), 17_600, H200)
    assert spread == H200.core_shared_bytes // 3 - 2048
    assert GATE.shared_bytes + 2 * spread > H200.core_shared_bytes >= spread + DOWN.shared_bytes + 4096
    wide = Ahead(96, 169_536, True)
    assert spread_bytes((ATTENTION, GATE, wide), 28_960, H200) == H200.core_shared_bytes - wide.shared_bytes - 4096


def test_blocks_are_not_spread_where_that_brings_nothing() -> None:
    fills = Ahead(112, 139_264, False)  # is asked for ahead of its turn, but behind these
    for ahead in ((), (GATE,), (fills, GATE, DOWN), (GATE, ATTENTION), (DOWN, GATE), (Ahead(96, 17_600, True), DOWN)):
        assert spread_bytes(ahead, 17_600, H200) == 17_600
    assert spread_bytes((GATE, DOWN), 136_256, H200) == 136_256


def test_blocks_that_can_have_a_multiprocessor_each_leave_no_room_for_another_of_theirs() -> None:
    alone = alone_bytes(128, 53_760, H200)
    assert alone * 2 <= H200.core_shared_bytes < (alone + 1024) * 2  # the driver keeps 1024 for each
    assert alone_bytes(128, 131_840, H200) == 131_840
    assert alone_bytes(H200.cores + 1, 53_760, H200) == 53_760
