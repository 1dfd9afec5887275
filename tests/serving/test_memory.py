"""Nothing is left of requests, answered or not; `python -m benchmarks.serving_memory` sends ten times as many."""

from __future__ import annotations

import pytest

from benchmarks.serving_memory import measure

_GROWTH = 2 << 20  # bytes between two of the later counts


def test_a_thousand_requests_of_which_a_third_are_cancelled_leave_nothing() -> None:
    for module in ("fastapi", "uvicorn", "llguidance", "prometheus_client", "jinja2", "tokenizers"):
        pytest.importorskip(module)
    figures = measure(1000)
    assert figures["answered"] == 666
    assert len(figures["cancelled"]) == 4
    assert sum(figures["cancelled"].values()) == 334
    before, warm, last = figures["held"][0], figures["held"][2], figures["held"][-1]
    assert last["finished"]["cancelled"] > 250
    for name in ("open", "waiting", "lanes", "used_pages"):
        assert last[name] == 0
    assert last["of_requests"] == {}
    assert last["available_pages"] == last["pages"]
    for name in ("tasks", "threads", "descriptors"):
        assert last[name] == before[name], name
    assert last["objects"] - warm["objects"] < 500
    assert last["resident_bytes"] - warm["resident_bytes"] < _GROWTH
    assert figures["threads_left"] == ["MainThread"]
