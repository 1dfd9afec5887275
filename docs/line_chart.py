"""Draws lines over a linear and a logarithmic axis, as SVG: the same figures always give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log

__all__ = ["Line", "line_chart"]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 36, 20, 92  # around the lines
_LEGEND_STEP = 216  # from one entry of the legend to the next


@dataclass(frozen=True)
class Line:
    """A line of the chart.

    Attributes:
        label: Its name in the legend.
        points: Pairs (x, y), in order of x.
        color: As SVG names it.
        dashed: Drawn as a bound, not as something measured.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    dashed: bool = False


def line_chart(
    lines: Sequence[Line], x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> str:
    """An SVG image; the axes reach from their first tick to their last one, and y is logarithmic.

    Args:
        lines: What to draw, the last on top.
        x_ticks, y_ticks: Where to write numbers, ascending; those of y are positive.
        x_label, y_label: What the axes count, with its unit.
    """
    across = _scale(x_ticks[0], x_ticks[-1], _LEFT, _WIDTH - _RIGHT)
    low, high = log(y_ticks[0]), log(y_ticks[-1])
    linear = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)

    def up(y: float) -> float:
        return linear(log(y))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        *_grid(x_ticks, y_ticks, across, up),
        *(_drawn(line, across, up) for line in lines),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 40, x_label, "middle"),
        _text(16, (_TOP + _HEIGHT - _BOTTOM) / 2, y_label, "middle", turned=True),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(first: float, last: float, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (value - first) / (last - first) * (end - begin)


def _grid(
    x_ticks: Sequence[float], y_ticks: Sequence[float], across: Callable[[float], float], up: Callable[[float], float]
) -> Iterable[str]:
    bottom = _HEIGHT - _BOTTOM
    for x in x_ticks:
        yield f'<path d="M{across(x):.1f} {_TOP}V{bottom}" stroke="#e4e4e4"/>'
        yield _text(across(x), bottom + 18, f"{x:,.0f}", "middle")
    for y in y_ticks:
        yield f'<path d="M{_LEFT} {up(y):.1f}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
        yield _text(_LEFT - 8, up(y) + 4, f"{y:g}", "end")


def _drawn(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    places = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
    return f'<polyline points="{places}" fill="none" stroke="{line.color}" stroke-width="2"{_dashes(line)}/>'


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 4"' if line.dashed else ""


def _legend(lines: Sequence[Line]) -> Iterable[str]:
    per_row = (_WIDTH - _LEFT) // _LEGEND_STEP
    for number, line in enumerate(lines):
        x, y = _LEFT + number % per_row * _LEGEND_STEP, _HEIGHT - 30 + number // per_row * 20
        yield f'<path d="M{x} {y}h22" stroke="{line.color}" stroke-width="2"{_dashes(line)}/>'
        yield _text(x + 28, y + 4, line.label, "start")


def _text(x: float, y: float, text: str, anchor: str, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'
