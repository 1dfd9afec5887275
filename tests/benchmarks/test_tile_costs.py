"""The constants of tiles: that a fit finds those that times were made with, and how products are made to be timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tile_costs import fit as fitting
from benchmarks.tile_costs.fit import FAMILIES, Row, chosen_loss, fit, read, with_constants
from benchmarks.tile_costs.json_text import text
from benchmarks.tile_costs.measure import batches, spread
from benchmarks.tile_costs.products import PRODUCTS, Timed
from cuda_compiler.devices import DEVICES
from cuda_compiler.products.bulk_tilings import bulk_candidates
from cuda_compiler.tiles.clusters import cluster_candidates
from cuda_compiler.tiles.teams import team_candidates
from cuda_compiler.tiles.tiling import BULK, CLUSTERED, TEAMS, WARPS, Asked
from cuda_compiler.tiles.warps import warp_candidates
from metal_compiler.devices import DEVICES as METAL_DEVICES
from npu_compiler.errors import InputError
from npu_compiler.lowering.candidates import Candidate

ROOT = Path(__file__).parents[2]
MODEL = DEVICES.named("sm_90", "cuda")
CANDIDATES = {
    WARPS: warp_candidates,
    CLUSTERED: cluster_candidates,
    TEAMS: team_candidates,
    BULK: bulk_candidates,
}
ASKED = [Asked(m, n, k) for m in (128, 700, 4096) for n, k in ((1536, 1536), (8960, 1536), (512, 4608), (64, 576))]


def rows(family: str, costs: Any) -> Iterator[Row]:
    """What candidates of a family take if these are its constants."""
    device = replace(MODEL, families={**MODEL.families, family: asdict(costs)})
    for asked in ASKED:
        for candidate in CANDIDATES[family](asked, device):
            yield Row(str(asked), family, asked, candidate.sizes, candidate.microseconds)


TOLD_APART = {  # of others, only sums count
    WARPS: ("start", "store", "split"),
    CLUSTERED: ("start", "store"),
    TEAMS: ("launch", "store"),
    BULK: ("launch", "store", "add"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_finds_the_constants_that_times_were_made_with(family: str) -> None:
    given = MODEL.constants(family, FAMILIES[family].costs)
    generator = np.random.default_rng(0)
    names, of_tiles = FAMILIES[family].fitted, FAMILIES[family].of_tiles
    true = replace(
        given,
        **{name: (getattr(given, name) or 900) * float(generator.uniform(0.8, 1.25)) for name in names},
        tiles=tuple(
            replace(tile, **{name: round(getattr(tile, name) * generator.uniform(0.85, 1.2)) for name in of_tiles})
            for tile in given.tiles[:-1]
        ),
    )
    times = list(rows(family, true))
    found = fit(family, given, times, MODEL)
    assert np.abs(found.before).mean() > 0.02
    assert np.abs(found.after).mean() < 0.01
    for name in TOLD_APART[family]:
        assert getattr(found.costs, name) == pytest.approx(getattr(true, name), rel=0.15)
    assert found.costs.tiles[-1] == given.tiles[-1]
    noisy = [replace(row, microseconds=row.microseconds * generator.uniform(0.95, 1.05)) for row in times]
    noisy[0] = replace(noisy[0], microseconds=50 * noisy[0].microseconds)  # one that went wrong
    assert np.median(np.abs(fit(family, given, noisy, MODEL).after)) < 0.05


def test_the_script_reports_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = MODEL.constants(BULK, FAMILIES[BULK].costs)
    products = [
        {
            "product": row.product,
            "asked": asdict(row.asked),
            "times": [{"family": row.family, "microseconds": row.microseconds, **asdict(row.tiling)}],
        }
        for row in rows(BULK, replace(costs, store=0.5, launch=2000))
    ]
    (tmp_path / "times.json").write_text(json.dumps({"products": products}))
    source = ROOT / "cuda_compiler/devices/sm_90.json"
    (tmp_path / "sm_90.json").write_text(source.read_text())
    monkeypatch.setattr(fitting, "files", lambda _: tmp_path)
    fitting.main([str(tmp_path / "times.json")])
    assert (tmp_path / "sm_90.json").read_text() == source.read_text()
    assert "bulk_tiles" in capsys.readouterr().out
    fitting.main([str(tmp_path / "times.json"), "--write"])
    written = json.loads((tmp_path / "sm_90.json").read_text())["fitted"][BULK]
    assert written["store"] == pytest.approx(0.5, rel=0.1)
    assert written["launch"] == pytest.approx(2000, rel=0.1)


def test_what_the_constants_in_the_data_choose_was_measured_to_be_close_to_the_best() -> None:
    times = read(ROOT / "benchmarks/tile_costs/measured/h200.json")
    costs = {family: MODEL.constants(family, kind.costs) for family, kind in FAMILIES.items()}
    assert {row.family for row in times} == set(FAMILIES)
    for are_brought in (False, True):  # which of the two serve a product, costs do not decide
        rows = [row for row in times if (row.family == BULK) == are_brought]
        if are_brought:  # tiles of 64 rows are for as few, and others for more
            rows = [row for row in rows if (row.tiling.rows == 64) == (row.asked.m <= 64)]
        assert chosen_loss(rows, costs, MODEL) < 0.025


def test_constants_are_written_for_a_device_that_had_none() -> None:
    data = json.loads((ROOT / "cuda_compiler/devices/sm_80.json").read_text())
    costs = DEVICES.named("sm_80", "cuda").constants(WARPS, FAMILIES[WARPS].costs)
    made = with_constants(data, WARPS, costs)["fitted"]
    assert made["on"] == data["description"]
    assert len(made[WARPS]["tiles"]) == len(costs.tiles)


def test_what_holds_no_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"products": [{"product": "p"}]}')
    with pytest.raises(InputError, match="does not hold times of candidates"):
        read(tmp_path / "other.json")


@pytest.mark.parametrize("product", [PRODUCTS[6], PRODUCTS[-3]], ids=lambda product: product.name)
def test_every_candidate_is_compiled_as_an_option(product: Timed) -> None:
    families = set()
    for batch in batches(product, 4):
        for option, candidate in batch.candidates.items():
            plan = batch.plan(option)
            assert len(plan.steps) == product.copies
            assert len(plan.kernels) == 1
            for name, value in (("TILE_M", candidate.sizes.rows), ("SPLITS", candidate.sizes.splits)):
                assert f"#define {name} {value}\n" in plan.kernels[0].text
            families.add(candidate.family)
    assert {WARPS, TEAMS} <= families


def test_candidates_near_and_far_are_timed() -> None:
    candidates = [Candidate("f", number, float(number)) for number in range(10, 40)]
    taken = [candidate.sizes for candidate in spread(candidates, 6)]
    assert taken == [10, 11, 12, 13, 19, 25]
    assert [candidate.sizes for candidate in spread(candidates[:2], 6)] == [10, 11]


def test_the_data_of_devices_are_written_as_the_fit_writes_them() -> None:
    for package, models in (("cuda_compiler", DEVICES), ("metal_compiler", METAL_DEVICES)):
        for name in models.names:
            given = (ROOT / package / "devices" / f"{name}.json").read_text()
            assert text(json.loads(given)) == given
