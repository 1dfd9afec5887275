"""What the CUDA benchmarks do with their figures; the times themselves need a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cuda_timing

_KEYS = ("model", "batch")


def _run(date: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"device": "a GPU", "date": date}, "ceilings": {"copy, GB/s": 4000.0}, "results": list(rows)}


def _row(batch: int, npu: float) -> dict[str, Any]:
    return {"model": "resnet18", "batch": batch, "npu": npu}


def test_a_row_measured_again_leaves_its_older_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    cuda_timing.write_run(path, _run("first", _row(1, 0.3), _row(64, 1.3)), _KEYS)
    cuda_timing.write_run(path, _run("second", _row(64, 1.0)), _KEYS)
    assert json.loads(path.read_text())["runs"] == [_run("first", _row(1, 0.3)), _run("second", _row(64, 1.0))]
    cuda_timing.write_run(path, _run("third", _row(1, 0.2), _row(64, 0.9)), _KEYS)
    assert json.loads(path.read_text())["runs"] == [_run("third", _row(1, 0.2), _row(64, 0.9))]


def test_a_run_written_while_it_grows_stays_one_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run = _run("today", _row(1, 0.3))
    cuda_timing.write_run(path, run, _KEYS)
    run["results"].append(_row(64, 1.3))
    cuda_timing.write_run(path, run, _KEYS)
    assert json.loads(path.read_text())["runs"] == [run]


def test_the_best_peer_is_one_that_was_compiled() -> None:
    assert cuda_timing.best_peer({"npu": 1.0, "eager": 4.0, "captured": 2.0, "compiled": None}) == {
        "ratio to the best peer": 0.5
    }
    assert cuda_timing.best_peer({"npu": 1.0}) == {}


def test_shares_are_of_the_better_bandwidth() -> None:
    ceilings = {"copy, GB/s": 2000.0, "matrix-vector product, GB/s": 4000.0, "matmul, TFLOP/s": 800.0}
    assert cuda_timing.shares(1.0, nbytes=10**9, flops=2 * 10**11, measured=ceilings) == {
        "GB/s": 1000.0,
        "share of the memory bandwidth": 0.25,
        "TFLOP/s": 200.0,
        "share of the matmul ceiling": 0.25,
    }


def _never_ending() -> None:
    while True:
        try:
            time.sleep(10)
        except Exception as error:
            pytest.fail(f"caught {error!r}")


def test_what_takes_too_long_is_stopped_even_where_exceptions_are_caught() -> None:
    with pytest.raises(cuda_timing.Expired), cuda_timing.time_limit(0.05):
        _never_ending()


def test_a_table_has_a_gap_where_a_row_has_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    cuda_timing.print_table(_run("today", _row(1, 0.3), {**_row(64, 1.3), "compiled": None}), _KEYS)
    printed = capsys.readouterr().out
    assert "resnet18, 64" in printed
    assert "compiled" in printed
