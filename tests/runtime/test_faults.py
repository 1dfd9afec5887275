"""The record of faults: which runs an error is for, and what a broken program can make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.errors import DeviceError, InputError, NPUError
from npu_runtime import Device
from npu_runtime.faults import FaultRecord
from tests.ops.cases import case, floats, integers


@pytest.fixture
def record(device: Device) -> FaultRecord:
    """Of an embedding of `x1` in ten rows."""
    ir = case("embedding.default", floats(10, 4), integers(2, 3)).ir(torch.float32)
    return FaultRecord(npu_compiler.compile(ir, device.target).main, device.backend)


def write(record: FaultRecord, check: int, element: int, value: int) -> None:
    """As a kernel does."""
    assert record.memory is not None
    with record.memory.writing() as content:
        content[:8].view(np.int32)[:] = check, element
        content[8:].view(np.int64)[:] = value


def test_nothing_happened(record: FaultRecord) -> None:
    record.look()
    record.runs.check()


def test_a_fault_is_told_once_and_stays_with_its_runs(record: FaultRecord) -> None:
    before = record.runs
    record.look()
    runs = record.runs
    write(record, 1, 4, 10**8)
    told = r"^input 'x1': given the index 100000000 at position \[1, 1\], expected 0 to 9, as 'node' indexes"
    with pytest.raises(InputError, match=told):
        record.look()
    record.look()
    record.runs.check()
    before.check()
    for _ in range(2):
        with pytest.raises(InputError, match=told):
            runs.check()


def test_a_look_at_runs_that_go_on_leaves_them_together(record: FaultRecord) -> None:
    runs = record.runs
    record.look(finished=False)
    write(record, 1, 0, -1)
    with pytest.raises(InputError, match="given the index -1 at position"):
        record.look(finished=False)
    with pytest.raises(InputError):
        runs.check()


def test_a_record_that_is_being_written_is_left_for_the_next_look(record: FaultRecord) -> None:
    write(record, -1, 0, 0)
    record.look(finished=False)
    write(record, 1, 2, 10)
    with pytest.raises(InputError, match=r"given the index 10 at position \[0, 2\]"):
        record.look()


@pytest.mark.parametrize(("check", "element"), [(2, 0), (2**31 - 1, 0), (1, -5), (1, 2**31 - 1)])
def test_what_no_kernel_of_ours_writes_is_an_error_all_the_same(record: FaultRecord, check: int, element: int) -> None:
    write(record, check, element, 77)
    with pytest.raises(NPUError) as caught:
        record.look()
    assert isinstance(caught.value, DeviceError) == (check != 1)


def test_a_plan_without_checks_has_no_record(device: Device) -> None:
    program = npu_compiler.compile(case("relu.default", floats(4)).ir(torch.float32), device.target)
    record = FaultRecord(program.main, device.backend)
    assert record.memory is None
    record.look()
