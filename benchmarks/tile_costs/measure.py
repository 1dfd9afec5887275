"""Times candidates of all families of tiles on a CUDA device.

Run it as ``python -m benchmarks.tile_costs.measure --json benchmarks/tile_costs/measured/h200.json``. Each product is
compiled with candidates of one family after the other as options, near and far from the best by the model of their
cost. A run computes the product several times with operands of their own, every time by the same candidate; the time
of one is that of all behind the first, so that it holds what a launch costs behind another kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.tile_costs.json_text import text
from benchmarks.tile_costs.products import PRODUCTS, Timed, weight_name
from cuda_compiler.images import convolution
from cuda_compiler.products import bulk, matmul
from cuda_compiler.products.bulk_tilings import bulk_candidates
from cuda_compiler.target import CUDATarget
from cuda_compiler.tiles.clusters import cluster_candidates
from cuda_compiler.tiles.teams import team_candidates
from cuda_compiler.tiles.tiling import Asked
from cuda_compiler.tiles.warps import warp_candidates
from cuda_runtime.backend import CUDABackend
from cuda_runtime.kernel_cache import compiled_kernels
from cuda_runtime.plan import CUDAPlan
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.workspace import Workspace

__all__ = ["Batch", "batches", "main", "spread"]

_FAR = 3.0  # times of the best candidate, by the model, beyond which none is timed
_WARM_UP, _ROUNDS = 2, 7
_NO_LIBRARY = {"rows": 1 << 30, "columns": 1 << 30}  # larger than any product


@dataclass(frozen=True)
class Batch:
    """A product compiled with some candidates as the first or last options of all its choices.

    Attributes:
        program: The program.
        asked: The product.
        candidates: What was chosen, by the number of its option.
    """

    program: CompiledProgram
    asked: Asked
    candidates: dict[int, Candidate[Any]]

    def plan(self, option: int) -> ExecutionPlan:
        """The plan that takes an option everywhere."""
        return self.program.main.resolved(lambda choice, kernels: option)


def spread(candidates: Sequence[Candidate[Any]], most: int) -> list[Candidate[Any]]:
    """The nearest half of so many by predicted time, and others evenly from those that are not too far."""
    ranked = sorted(candidates, key=lambda candidate: candidate.microseconds)
    ranked = [each for each in ranked if each.microseconds <= _FAR * ranked[0].microseconds]
    near, rest = ranked[: most // 2], ranked[most // 2 :]
    count = min(len(rest), most - len(near))
    return [*near, *(rest[number * len(rest) // count] for number in range(count))]


class _Chooser:
    """In the place of what chooses tilings: takes candidates near and far, and remembers which."""

    def __init__(self, families: Sequence[Callable[[Asked, DeviceModel], Iterable[Candidate[Any]]]], most: int) -> None:
        self._families, self._most = families, most
        self.asked: Asked | None = None
        self.found: list[Candidate[Any]] = []

    def __call__(self, asked: Asked, device: DeviceModel, *_: object) -> tuple[Any, ...]:
        self.asked = asked
        self.found = [each for family in self._families for each in spread([*family(asked, device)], self._most)]
        return tuple(candidate.sizes for candidate in self.found)


def batches(product: Timed, most: int) -> Iterator[Batch]:
    """The product with candidates of tiles that threads copy, and with those that the copy engine brings.

    Args:
        product: What to compute.
        most: Candidates of a family.
    """
    base = CUDATarget().device
    model = replace(base, families={**base.families, "library": _NO_LIBRARY})
    copied = _Chooser([warp_candidates, cluster_candidates, team_candidates], most)
    with (
        patch.object(matmul, "close_tilings", copied),
        patch.object(convolution, "close_tilings", copied),
        patch.object(matmul, "bulk_options", lambda *_: []),
    ):
        yield _batch(compile(product.ir(), "cuda", device=model), copied, behind=True)
    brought = _Chooser([bulk_candidates], most)
    with patch.object(bulk, "bulk_tilings", brought):
        program = compile(product.ir(), "cuda", device=model)
    if brought.found:
        yield _batch(program, brought, behind=False)


def _batch(program: CompiledProgram, chooser: _Chooser, *, behind: bool) -> Batch:
    """A program whose candidates are the first options of a choice, or `behind` others."""
    assert chooser.asked is not None
    options = max(len(step.options) for step in program.main.steps if isinstance(step, CallChoice))
    first = options - len(chooser.found) if behind else 0
    return Batch(program, chooser.asked, {first + number: each for number, each in enumerate(chooser.found)})


class _Bench:
    """The device, and the operands of the product at hand."""

    def __init__(self, device: Device, product: Timed, program: CompiledProgram) -> None:
        generator = np.random.default_rng(0)
        image, weight = (
            (generator.standard_normal(shape, dtype=np.float32) * 0.1).astype(np.float16)
            for shape in (product.image, product.weight)
        )
        names = [weight_name(copy) for copy in range(product.copies)]
        self._device, self._workspace = device, Workspace(device.backend)
        self._weights = load_weights(dict.fromkeys(names, weight), program, device)
        self._inputs = {spec.name: NPUBuffer.from_numpy(image, device, spec) for spec in program.main.inputs}
        self._outputs = {
            spec.name: NPUBuffer.from_numpy(np.zeros(spec.shape, np.float16), device, spec)
            for spec in program.main.outputs
        }

    def microseconds(self, program: CompiledProgram, plan: ExecutionPlan) -> float:
        """The time of one of the steps of a plan without choices, behind the first."""
        executor = Executor(replace(program, functions={"main": plan}), self._device, workspace=self._workspace)
        bound = executor.bind(self._inputs, self._outputs, self._weights)
        assert isinstance(bound.plan, CUDAPlan)
        timer = bound.plan.timer(bound.buffers, [range(1, len(plan.steps))])
        samples = [timer()[0] for _ in range(_WARM_UP + _ROUNDS)]
        return median(samples[_WARM_UP:]) * 1e6 / (len(plan.steps) - 1)


def _times(product: Timed, device: Device, most: int) -> dict[str, Any]:
    """A product, and the times of its candidates, as they are written: the sizes of each beside its time."""
    times = []
    assert isinstance(device.backend, CUDABackend)
    for batch in batches(product, most):
        plans = {option: batch.plan(option) for option in batch.candidates}
        kernels = {kernel for plan in plans.values() for kernel in plan.kernels}
        compiled_kernels([*kernels], device.backend.capability)  # all at once; each plan then finds its own
        bench = _Bench(device, product, batch.program)
        for option, plan in plans.items():
            candidate, time = batch.candidates[option], bench.microseconds(batch.program, plan)
            times.append({"family": candidate.family, "microseconds": round(time, 3), **asdict(candidate.sizes)})
    return {"product": product.name, "asked": asdict(batch.asked), "times": times}


def main(arguments: Sequence[str] | None = None) -> None:
    """Times all products, those of different kinds in turns, for as long as it may; writes after each."""
    parser = argparse.ArgumentParser(description="Times candidates of tiles on a CUDA device.")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the times")
    parser.add_argument("--most", type=int, default=10, metavar="N", help="candidates of a family; default: 10")
    parser.add_argument("--seconds", type=float, default=200, help="begin no product later; default: 200")
    options = parser.parse_args(arguments)
    device, start, measured = Device("cuda"), perf_counter(), list[dict[str, Any]]()
    machine = {"device": device.backend.name, "date": datetime.now(UTC).date().isoformat()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(PRODUCTS))
    for number, index in enumerate(order):
        if perf_counter() - start > options.seconds:
            print(f"{len(PRODUCTS) - number} products were left out", flush=True)
            break
        measured.append(_times(PRODUCTS[index], device, options.most))
        options.json.write_text(text({"machine": machine, "products": measured}))
        times = measured[-1]["times"]
        best = min(times, key=lambda time: time["microseconds"])
        print(
            f"{perf_counter() - start:5.0f} s  {PRODUCTS[index].name}: {len(times)} candidates, the best "
            f"{best['microseconds']:.1f} us by {best['family']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
