"""Fits the constants of the tiles' costs to measured times, and says how far off they are before and after.

Run it as ``python -m benchmarks.tile_costs.fit benchmarks/tile_costs/measured/h200.json --device sm_90``; it needs no
GPU. With ``--write`` the fitted constants take the place of those in the device's data. The errors are relative, and
the fit minimizes the squares of their logarithms, of which single large ones count less (Levenberg and Marquardt's
method with numerical derivatives, and Huber's weights).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tile_costs.json_text import text
from cuda_compiler.devices import DEVICES
from cuda_compiler.products.bulk_tilings import BulkCosts, BulkTiling, bulk_clocks
from cuda_compiler.tiles.clusters import ClusterCosts, ClusterTiling, cluster_clocks
from cuda_compiler.tiles.teams import TeamCosts, TeamTiling, team_clocks
from cuda_compiler.tiles.tiling import BULK, CLUSTERED, TEAMS, WARPS, Asked
from cuda_compiler.tiles.warps import WarpCosts, WarpTiling, warp_clocks
from npu_compiler.errors import InputError
from npu_compiler.lowering.device_model import DeviceModel

__all__ = ["FAMILIES", "Fit", "Row", "chosen_loss", "errors", "fit", "main", "read", "with_constants"]

Array = NDArray[np.float64]
_DIGITS = 4  # of a fitted constant
_HUBER = 0.15  # of a relative error: larger ones count in proportion, not by their squares
_STEPS = 60
_CHANGE = 1e-3  # of a constant, for derivatives
_ENOUGH = 1e-6  # a gain relative to the sum of squares below which nothing more is tried
_LEAST = 1.0  # clocks that a constant of zero begins with
_NONE = 1e-4  # a constant below this is written as none
_KEPT = 0.001  # of a row's weight, for each constant to stay where it was: those that no time depends on do


@dataclass(frozen=True)
class Row:
    """A measured time.

    Attributes:
        product: Its name: rows of one product compare.
        family: The family of the candidate.
        asked: What was computed.
        tiling: The candidate.
        microseconds: How long it took.
    """

    product: str
    family: str
    asked: Asked
    tiling: Any
    microseconds: float


@dataclass(frozen=True)
class _Family:
    """How a family's constants are fitted.

    Attributes:
        costs: Their type.
        tiling: The type of a candidate's sizes.
        clocks: The model: clocks of a candidate of a tile, given the tile, the constants, the product and the device.
        identity: Fields that a tile and a candidate have in common, and that tell tiles apart.
        fitted: Constants of the family that are fitted.
        fractions: Those of them that are at most one.
        of_tiles: Constants of each tile that are fitted.
    """

    costs: type[Any]
    tiling: type[Any]
    clocks: Callable[[Any, Any, Any, Asked, DeviceModel], float]
    identity: Callable[[Any], tuple[object, ...]]
    fitted: tuple[str, ...]
    of_tiles: tuple[str, ...] = ()
    fractions: tuple[str, ...] = ()


FAMILIES: Mapping[str, _Family] = {
    WARPS: _Family(
        WarpCosts,
        WarpTiling,
        warp_clocks,
        lambda each: (each.rows, each.columns, each.depth, each.warps_m, each.warps_n, each.blocks),
        ("start", "store", "split", "partial_bytes", "traffic_bytes"),
        ("products", "step"),
    ),
    CLUSTERED: _Family(
        ClusterCosts,
        ClusterTiling,
        lambda tiling, tile, costs, *rest: cluster_clocks(tiling, tile, costs, *rest) / costs.margin,
        lambda each: (each.rows, each.columns, each.blocks),
        (
            *("launch", "start", "store_alone", "store", "split", "split_result"),
            *("copy_bytes", "cache_bytes", "memory_bytes"),
        ),
        ("products", "step"),
    ),
    TEAMS: _Family(
        TeamCosts,
        TeamTiling,
        team_clocks,
        lambda each: (each.rows, each.columns, each.teams),
        ("launch", "step", "store", "result", "late_byte", "copy_bytes"),
        ("products",),
    ),
    BULK: _Family(
        BulkCosts,
        BulkTiling,
        lambda tiling, tile, costs, *rest: bulk_clocks(tiling, costs, *rest),
        lambda each: (each.rows, each.columns, each.turns, each.splits),
        ("launch", "whole_rounds", "step", "store", "add", "add_result", "memory_bytes", "cache_bytes"),
        fractions=("whole_rounds",),
    ),
}


@dataclass(frozen=True)
class Fit:
    """What fitting a family found.

    Attributes:
        costs: The constants.
        before, after: Relative errors of all rows, by the constants given and by those found.
    """

    costs: Any
    before: Array
    after: Array


def read(path: Path) -> list[Row]:
    """The rows of a file that `measure` wrote.

    Raises:
        InputError: It is no such file.
    """
    try:
        products = json.loads(path.read_text())["products"]
        return [_row(product, dict(time)) for product in products for time in product["times"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"'{path}' does not hold times of candidates ({type(error).__name__}: {error}); "
            "benchmarks.tile_costs.measure writes such a file"
        ) from error


def _row(product: Mapping[str, Any], time: dict[str, Any]) -> Row:
    family, microseconds = time.pop("family"), time.pop("microseconds")
    tiling = FAMILIES[family].tiling(**time)
    return Row(product["product"], family, Asked(**product["asked"]), tiling, microseconds)


class _Problem:
    """The logarithms of predicted times as a function of the logarithms of constants."""

    def __init__(self, family: _Family, costs: Any, rows: Sequence[Row], device: DeviceModel) -> None:
        numbers = {family.identity(tile): number for number, tile in enumerate(costs.tiles)}
        named = ((row, numbers.get(family.identity(row.tiling))) for row in rows)
        self._known = [(row, number) for row, number in named if number is not None]
        timed = sorted({number for _, number in self._known})
        self._places: list[tuple[int | None, str]] = [(None, name) for name in family.fitted]
        self._places += [(number, name) for number in timed for name in family.of_tiles]
        self._family, self._costs, self._device = family, costs, device
        self.measured = np.log([row.microseconds for row, _ in self._known])

    @property
    def start(self) -> Array:
        """The constants as given."""
        given = (getattr(self._holder(number), name) for number, name in self._places)
        return np.log([value or _LEAST for value in given])

    def _holder(self, number: int | None) -> Any:
        return self._costs if number is None else self._costs.tiles[number]

    def costs(self, logarithms: Array) -> Any:
        """Constants of the family's type."""
        own: dict[str, float] = {}
        of_tiles: dict[int, dict[str, float]] = defaultdict(dict)
        for (number, name), logarithm in zip(self._places, logarithms, strict=True):
            value = float(np.exp(min(logarithm, 0.0) if name in self._family.fractions else logarithm))
            if number is None:
                own[name] = value
            else:
                of_tiles[number][name] = value
        tiles = tuple(replace(tile, **of_tiles[number]) for number, tile in enumerate(self._costs.tiles))
        return replace(self._costs, tiles=tiles, **own)

    def predicted(self, costs: Any) -> Array:
        """The logarithm of each row's time in microseconds."""
        clocks = (
            self._family.clocks(row.tiling, costs.tiles[number], costs, row.asked, self._device)
            for row, number in self._known
        )
        return np.log([self._device.microseconds(each) for each in clocks])

    def residuals(self, logarithms: Array) -> Array:
        """How far the logarithms of the times are off, and, of little weight, how far the constants have moved."""
        off = self.predicted(self.costs(logarithms)) - self.measured
        return np.concatenate([off, _KEPT * (logarithms - self.start)])


def fit(family: str, costs: Any, rows: Sequence[Row], device: DeviceModel) -> Fit:
    """Fits the constants of a family.

    Args:
        family: Its name.
        costs: The constants to begin with; tiles that were not timed keep theirs.
        rows: Measured times, of this family alone.
        device: Where they were measured.
    """
    problem = _Problem(FAMILIES[family], costs, rows, device)
    before = np.expm1(problem.predicted(costs) - problem.measured)
    found = problem.costs(_minimized(problem.residuals, problem.start))
    return Fit(found, before, np.expm1(problem.predicted(found) - problem.measured))


def _minimized(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Where the sum of Huber's losses of the residuals is least, as Levenberg and Marquardt find it."""
    point, damping = start, 1e-2
    errors_ = residuals(point)
    loss = _loss(errors_)
    for _ in range(_STEPS):
        slopes = np.stack([(residuals(point + step) - errors_) / _CHANGE for step in np.eye(len(point)) * _CHANGE], 1)
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(errors_), 1e-12))
        normal, gradient = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * errors_)
        gained = 0.0
        while damping < 1e6:
            scale = np.diag(normal) + 1e-6 * max(np.diag(normal).max(), 1e-12)
            step = np.linalg.solve(normal + damping * np.diag(scale), -gradient)
            moved = point + np.clip(step, -0.7, 0.7)  # a constant at most doubles in a step
            tried = residuals(moved)
            gained = loss - _loss(tried)
            if gained > 0:
                point, errors_, loss, damping = moved, tried, loss - gained, damping / 3
                break
            damping *= 4
        if gained <= _ENOUGH * max(loss, 1e-12):
            break
    return point


def _loss(errors_: Array) -> float:
    size = np.abs(errors_)
    return float(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())


def errors(relative: Array) -> str:
    """The distribution of relative errors in a few words."""
    size = np.sort(np.abs(relative)) * 100
    middle, most = np.percentile(size, [50, 90])
    return f"{size.mean():5.1f} % on average, {middle:5.1f} % in the middle, {most:5.1f} % for nine of ten"


def chosen_loss(rows: Sequence[Row], costs: Mapping[str, Any], device: DeviceModel) -> float:
    """How much longer than the quickest candidates those take that are predicted to be it, summed over products."""
    taken = best = 0.0
    for of_product in _grouped(rows, lambda row: row.product).values():
        predicted = []
        for row in of_product:
            family = FAMILIES[row.family]
            tiles = {family.identity(tile): tile for tile in costs[row.family].tiles}
            if family.identity(row.tiling) in tiles:
                tile = tiles[family.identity(row.tiling)]
                predicted.append((family.clocks(row.tiling, tile, costs[row.family], row.asked, device), row))
        if predicted:
            taken += min(predicted, key=lambda pair: pair[0])[1].microseconds
            best += min(row.microseconds for _, row in predicted)
    return taken / best - 1 if best else 0.0


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _report(rows: Sequence[Row], before: Mapping[str, Any], fits: Mapping[str, Fit], device: DeviceModel) -> None:
    after = {**before, **{family: found.costs for family, found in fits.items()}}
    for family, found in fits.items():
        print(f"{family}, {len(found.before)} times")
        own = [row for row in rows if row.family == family]
        for what, relative, costs in (("now", found.before, before), ("fitted", found.after, after)):
            loss = 100 * chosen_loss(own, costs, device)
            print(f"  {what:<7} off by {errors(relative)}; what it chooses takes {loss:.1f} % longer than the best")
        for name in FAMILIES[family].fitted:
            old, new = getattr(before[family], name), getattr(found.costs, name)
            print(f"    {name:<14} {old:>10.4g} -> {new:.4g}")
    for families, what in (([WARPS, CLUSTERED, TEAMS], "tiles that threads copy"), ([*FAMILIES], "all families")):
        own = [row for row in rows if row.family in families]
        losses = (100 * chosen_loss(own, costs, device) for costs in (before, after))
        print("choosing among {}: {:.1f} % longer than the best, fitted {:.1f} %".format(what, *losses))


def _rounded(value: float) -> float | int:
    """So many digits as a fit can tell."""
    short = float(f"{value:.{_DIGITS}g}") if value >= _NONE else 0.0
    return int(short) if short.is_integer() else short


def with_constants(data: Mapping[str, Any], family: str, costs: Any) -> dict[str, Any]:
    """The data of a device with other constants of a family, as they are written; of one that had none, too."""
    fitted = data.get("fitted", {})
    wanted, section = FAMILIES[family], dict(fitted.get(family) or json.loads(json.dumps(asdict(costs))))
    section |= {name: _rounded(getattr(costs, name)) for name in wanted.fitted}
    section["tiles"] = [
        {**given, **{name: round(getattr(tile, name)) for name in wanted.of_tiles}}
        for given, tile in zip(section["tiles"], costs.tiles, strict=True)
    ]
    return {**data, "fitted": {"on": data["description"], **fitted, family: section}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits all families that were timed, prints what came out, and writes it where that is asked for."""
    parser = argparse.ArgumentParser(description="Fits the constants of the tiles' costs to measured times.")
    parser.add_argument("times", type=Path, metavar="TIMES.json", help="what benchmarks.tile_costs.measure wrote")
    parser.add_argument("--device", default=DEVICES.default, help=f"whose data; default: {DEVICES.default}")
    parser.add_argument("--write", action="store_true", help="put the fitted constants into the device's data")
    options = parser.parse_args(arguments)
    rows, device = read(options.times), DEVICES.named(options.device, "cuda")
    before = {family: device.constants(family, kind.costs) for family, kind in FAMILIES.items()}
    fits = {
        family: fit(family, before[family], own, device)
        for family, own in sorted(_grouped(rows, lambda row: row.family).items())
    }
    _report(rows, before, fits, device)
    if options.write:
        path = Path(str(files(DEVICES.package).joinpath(f"{options.device}.json")))
        data = json.loads(path.read_text())
        for family, found in fits.items():
            data = with_constants(data, family, found.costs)
        path.write_text(text(data))
        print(f"{path}: written")


if __name__ == "__main__":
    main()
