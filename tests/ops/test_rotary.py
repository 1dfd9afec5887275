"""The opaque node that an export under ``no_grad`` leaves of a rotary embedding, as pytorch-ir writes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import npu_compiler
from npu_compiler.errors import UnsupportedOpError
from npu_runtime import Device, Executor

COUNT, LENGTH = 8, 5
FREQUENCIES = {"name": "inv_freq", "shape": [COUNT], "dtype": "float32"}
POSITIONS = {"name": "position_ids", "shape": [1, LENGTH], "dtype": "int64"}


def _ir(*inputs: dict[str, Any]) -> dict[str, Any]:
    made = [{"name": name, "shape": [1, LENGTH, 2 * COUNT], "dtype": "float32"} for name in ("wrap_0", "wrap_1")]
    picked = [{**made[0], "name": "cos"}, {**made[1], "name": "sin"}]
    opaque = {
        "name": "wrap",
        "op_type": "wrap_with_set_grad_enabled",
        "inputs": [*inputs],
        "outputs": made,
        "attrs": {},
    }
    pieces = [
        {
            "name": spec["name"],
            "op_type": "<built-in function getitem>",
            "inputs": made,
            "outputs": [spec],
            "attrs": {"index": i},
        }
        for i, spec in enumerate(picked)
    ]
    return {
        "model_name": "angles",
        "graph_inputs": [*inputs],
        "graph_outputs": picked,
        "weights": [],
        "weight_name_mapping": {},
        "nodes": [opaque, *pieces],
    }


def test_angles_are_those_of_positions_beyond_half_precision(device: Device) -> None:
    program = npu_compiler.compile(_ir(FREQUENCIES, POSITIONS), target=device.target)
    frequencies = (10000.0 ** -(np.arange(COUNT) / COUNT)).astype(np.float32)
    positions = np.array([[0, 1, 7, 2049, 30001]])
    given = Executor(program, device).compute({"inv_freq": frequencies, "position_ids": positions})
    angles = np.tile(positions[..., None] * frequencies.astype(np.float64), 2)
    np.testing.assert_allclose(given["cos"], np.cos(angles), atol=4e-3)
    np.testing.assert_allclose(given["sin"], np.sin(angles), atol=4e-3)


@pytest.mark.parametrize(
    "inputs",
    [
        (FREQUENCIES,),
        (FREQUENCIES, {**FREQUENCIES, "name": "other"}),
        (FREQUENCIES, POSITIONS, {**POSITIONS, "name": "other"}),
        ({**FREQUENCIES, "shape": [1, COUNT]}, POSITIONS),
    ],
    ids=["alone", "no positions", "a third", "a matrix"],
)
def test_another_opaque_node_is_refused(inputs: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(UnsupportedOpError, match="no rotary embedding"):
        npu_compiler.compile(_ir(*inputs))
