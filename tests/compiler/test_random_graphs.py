"""Random models through every pass, fused, placed in memory and run by numpy, against torch."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from npu_compiler.errors import UnsupportedOpError
from tests.compiler.random_graphs import RandomModel
from tests.support.reference_target import plan_ir


@given(st.data())
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
def test_a_plan_computes_what_torch_computes(data: st.DataObject) -> None:
    model = RandomModel(data.draw)
    for _ in range(data.draw(st.integers(1, 2))):
        model.add_input()
    for _ in range(data.draw(st.integers(1, 8))):
        model.step()
    outputs = model.outputs()
    note("\n".join([*model.calls, f"outputs: {outputs}"]))
    ir = model.builder.build(*(value for value, _ in outputs))
    try:
        planned = plan_ir(ir)
    except UnsupportedOpError as error:
        assume("changes memory in place" not in error.reason)
        raise
    results = planned.run(model.inputs, model.weights)
    for result, (value, expected) in zip(results, outputs, strict=True):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-9, atol=1e-7 * scale, err_msg=value.name)
