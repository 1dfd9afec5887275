"""Tables and pictures that the documentation makes of results."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from docs.cuda_figures import decode_chart, llm_table, resnet_table, sweep_text
from docs.line_chart import Line, line_chart

_MACHINE = {"device": "a GPU", "date": "2026-01-01"}
_SVG = "{http://www.w3.org/2000/svg}"


def _results(*rows: dict[str, Any]) -> dict[str, Any]:
    ceilings = ({"copy, GB/s": 4000.0}, {"copy, GB/s": 4100.0})
    return {
        "runs": [{"machine": _MACHINE, "ceilings": c, "results": [row]} for c, row in zip(ceilings, rows, strict=True)]
    }


def test_each_run_gives_its_rows_and_a_peer_that_is_missing_leaves_a_gap() -> None:
    first = {"model": "resnet18", "batch": 1, "npu": 0.1, "npu, least": 0.099, "npu, greatest": 0.101, "eager": 2.5}
    second = {"model": "resnet18", "batch": 64, "npu": 1.0, "compiled": None, "compiled, not compiled within, s": 60.0}
    lines = list(resnet_table(_results(first, second), 0))
    assert lines[0].startswith("device: a GPU, date: 2026-01-01. Ceilings measured beside it: copy 4,000–4,100 GB/s")
    assert lines[4] == "| resnet18, 1 | **0.100** | 2.500 | - |"
    assert lines[5] == "| resnet18, 64 | **1.000** | - | > 60 s |"
    assert "differ by 2.0% at most" in lines[-1]


@pytest.mark.parametrize("language", [0, 1])
def test_tables_have_as_many_cells_as_columns(language: int) -> None:
    row = {"workload": "decode_2048", "position": 128, "npu": 1.0, "same argmax": False}
    table = [line for line in llm_table(_results(row, row), language) if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("language", [0, 1])
def test_the_chart_draws_what_was_measured(language: int) -> None:
    share = {"share of the memory bandwidth": 0.7}
    row = {"workload": "decode_32768", "position": 1, "npu": 1.0, "captured": 10.9, **share}
    chart = ElementTree.fromstring(decode_chart(_results(row, {**row, "position": 32640, "npu": 1.4}), language))
    lines = chart.findall(f"{_SVG}polyline")
    assert len(lines) == 3  # PyTorch captured, the floor, this project
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)


@pytest.mark.parametrize(("language", "expected"), [(0, "1.400 ms at the slowest of 2 positions, 32640"), (1, "32640")])
def test_the_slowest_position_is_named(language: int, expected: str) -> None:
    row = {"workload": "decode_32768", "position": 1, "npu": 1.0}
    (line,) = list(sweep_text(_results({**row, "position": 32640, "npu": 1.4}, row), language))[2:]
    assert expected in line


def test_lines_lie_between_the_axes() -> None:
    chart = ElementTree.fromstring(
        line_chart([Line("a < b", [(0, 1), (10, 100)], "#000")], (0, 10), (1, 100), "x", "y")
    )
    (line,) = chart.findall(f"{_SVG}polyline")
    (left, bottom), (right, top) = (map(float, pair.split(",")) for pair in line.attrib["points"].split())
    grid = [path.attrib["d"] for path in chart.findall(f"{_SVG}path")]
    assert f"M{left:.1f} {top:.0f}V{bottom:.0f}" in grid
    assert f"M{right:.1f} {top:.0f}V{bottom:.0f}" in grid
    assert any(text.text == "a < b" for text in chart.findall(f"{_SVG}text"))
