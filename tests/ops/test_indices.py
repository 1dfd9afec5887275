"""Indices beyond their tensor: no memory is touched for them, and an error says which index it was."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_runtime.metal_api import MetalApi
from npu_compiler.errors import InputError
from npu_runtime import Device, MetalBackend, NPUBuffer
from software_gpu import metal
from software_gpu.checks import find_problems
from tests.ops.indexed import GRAPHS, HOSTILE, Indexed

KINDS = {"int64, float16": (torch.int64, torch.float16), "int32, bfloat16": (torch.int32, torch.bfloat16)}
CHECKED = ("embedding", "embedding, cat", "index of two", "gather", "index_copy in place", "decode")


@cache
def indexed(name: str, kind: str) -> Indexed:
    ids, compute = KINDS[kind]
    return Indexed(name, Device("software-metal"), compute, ids)


def hostile(graph: Indexed) -> list[int]:
    """All hostile values that the indices' data type holds."""
    extent, limits = graph.graph.extent, torch.iinfo(graph.ids)
    values = (*HOSTILE, extent, extent + 1, -extent, -extent - 1)
    return [value for value in values if limits.min <= value <= limits.max]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_index_reads_or_writes_beyond_its_tensor(name: str, kind: str) -> None:
    graph = indexed(name, kind)
    count = int(np.prod(graph.graph.ids))
    inside = st.integers(graph.graph.lowest, graph.graph.extent - 1)

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.lists(st.one_of(inside, st.sampled_from(hostile(graph))), min_size=count, max_size=count))
    def with_any_indices(ids: list[int]) -> None:
        writes = "index_copy" in name or "decode" in name
        if len(set(ids)) == len(ids) or not writes:  # the order of two writes to one place is anybody's
            graph.check(ids)

    for value in hostile(graph):
        graph.check([*range(count - 1), value])
    with_any_indices()
    graph.check([*range(count)][::-1])


@pytest.mark.parametrize("name", CHECKED)
def test_no_access_out_of_bounds(name: str) -> None:
    device = Device(MetalBackend(MetalApi(metal, metal.create_device(check=True), nullcontext)))
    graph = Indexed(name, device, torch.float16, torch.int64)
    assert all(find_problems(kernel.text) == [] for kernel in graph.executor.plan.kernels)
    count = int(np.prod(graph.graph.ids))
    for value in (0, *hostile(graph)):
        graph.check([value, *range(1, count)])


def test_what_is_updated_in_place_keeps_its_other_contents() -> None:
    graph = indexed("index_copy in place", "int64, float16")
    inputs = graph.inputs([0, 5000, 2])
    told = r"'ids': given the index 5000 at position \[1\], expected 0 to 5, as 'index_copy"
    with pytest.raises(InputError, match=told):
        graph.executor.run(inputs)
    kept = inputs["x0"].to_numpy()
    np.testing.assert_array_equal(kept[:, [1, 3, 4, 5]], graph.floats[0].numpy()[:, [1, 3, 4, 5]])
    np.testing.assert_array_equal(kept[:, [0, 2]], graph.floats[1].numpy()[:, [0, 2]])


def test_the_first_run_after_a_fault_is_as_any_other() -> None:
    graph = indexed("embedding", "int64, float16")
    for ids in ([100_000_000] * 6, [9] * 6, [-1] * 6, [0] * 6):
        graph.check(ids)


def test_a_fault_is_told_from_a_timed_run_too() -> None:
    graph = indexed("embedding", "int64, float16")
    with pytest.raises(InputError, match="given the index 10 at"):
        graph.executor.run_timed(graph.inputs([10] * 6))


def test_positions_that_are_known_to_exist_are_not_checked() -> None:
    """Only the second of two indices comes from an input."""
    (check,) = indexed("index of two", "int64, float16").executor.plan.checks
    assert (check.tensor, check.extent, check.wraps) == ("ids", 8, True)


def test_integers_that_the_device_would_wrap_around_are_refused() -> None:
    graph = indexed("embedding", "int32, bfloat16")
    spec = next(spec for spec in graph.executor.plan.inputs if spec.name == "ids")
    with pytest.raises(InputError, match="given an array of dtype int64, expected int32"):
        NPUBuffer.from_numpy(np.full((2, 3), 2**32 + 3), graph.device, spec)
