"""What the scheduler makes of a device whose two streams share it, by whatever shares, and of a server's loop."""

from __future__ import annotations

import pytest

from benchmarks.serving_simulation import Client, Costs, LoopCosts, simulate


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_prompts_go_in_beside_steps(share: float) -> None:
    """The device's two streams are kept busy, and no running text waits for a chunk."""
    costs = Costs(packs={}, beside={1: (share, 1.1 - share)}, client=(3.0, 3.0))
    busy = simulate(costs, Client(clients=64, seconds=2.5))
    alone = 1000 * max(costs.steps) / (costs.steps[64] + costs.ahead)
    in_turns = 64 * 256 / (64 * costs.chunks[512] + 256 * (costs.steps[64] + costs.ahead)) * 1000
    assert in_turns < busy["tokens/s"] < alone
    step = costs.steps[64] / share + 0.5
    assert busy["between p99"] < step
    assert busy["between most"] < 2 * step  # behind its first token: a step without it was asked for already
    half = simulate(costs, Client(rate=50, seconds=5))
    assert half["first p99"] < 30


def test_a_busy_loop_costs_tokens() -> None:
    """Prompts go in by twos where requests are read quickly."""
    given = [simulate(Costs(loop=LoopCosts().times(factor)), Client(64, seconds=2.5)) for factor in (0.5, 2.5)]
    assert given[0]["tokens/s"] > 1.05 * given[1]["tokens/s"]
    assert given[0]["prompts alone"] < 0.2 < given[1]["prompts alone"]
    assert given[0]["loop busy"] < 0.3 < given[1]["loop busy"]
