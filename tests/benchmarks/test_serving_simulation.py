"""What the scheduler makes of a device whose two streams share it, by whatever shares."""

from __future__ import annotations

import pytest

from benchmarks.serving_simulation import Client, Costs, simulate


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_prompts_go_in_beside_steps(share: float) -> None:
    """The device's two streams are kept busy, and no running text waits for a chunk."""
    costs = Costs(share=share, client=3.0)
    busy = simulate(costs, Client(clients=64, seconds=2.5))
    alone = 1000 * max(costs.steps) / (costs.steps[64] + costs.ahead)
    in_turns = 64 * 256 / (64 * (costs.together - costs.steps[64]) + 256 * (costs.steps[64] + costs.ahead)) * 1000
    assert in_turns < busy["tokens/s"] < alone
    step = costs.steps[64] / share + 0.5
    assert busy["between p99"] < step
    assert busy["between most"] < 2 * step  # behind its first token: a step without it was asked for already
    half = simulate(costs, Client(rate=50, seconds=5))
    assert half["first p99"] < 30
