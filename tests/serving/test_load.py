"""`benchmarks.serving_load` on a small load: locust's clients are answered, and what they tell is true."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.serving_load import Load, ask, span_answered, throughput
from tests.support.serving import serve

HAS_LOCUST = find_spec("locust") is not None  # imported, it would change sockets and threads of this process


@pytest.mark.skipif(not HAS_LOCUST, reason="locust is not installed")
@pytest.mark.parametrize("period", [None, 0.2])
def test_clients_of_locust(period: float | None) -> None:
    load = Load(clients=4, prompt=12, answer=9)
    with serve() as server:
        records = ask(server.url, 256, load, load.clients, 1.0 if period is None else 3.0, period)
        finished = dict(server.service.core.driver.scheduler.counters.finished)
    assert len({record["client"] for record in records}) == load.clients
    assert finished == {"length": len(records)}
    assert {record["tokens"] for record in records} == {load.answer}
    assert all(record["asked"] < record["first"] < record["end"] for record in records)


def test_tokens_a_second_are_those_of_the_time_in_which_all_clients_ask() -> None:
    records = [
        {"client": client, "asked": start, "first": start, "end": end, "tokens": 100}
        for client, start, end in (("a", 0, 10), ("a", 10, 20), ("b", 5, 15), ("b", 15, 25))
    ]
    assert throughput(records) == pytest.approx(20)  # from 5 to 20
    assert span_answered(records) == (15, 20)  # b's first answer, a's last
    assert span_answered(records[:1]) == (10, 10)
