"""Where the time of a run goes: each kernel by itself, the copies to and from the device, the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall
from npu_compiler.errors import InputError
from npu_runtime.backend import Traffic
from npu_runtime.buffer import NPUBuffer
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import Weights

__all__ = ["KernelProfile", "Profile", "Profiler"]


@dataclass
class KernelProfile:
    """All launches of one kernel so far.

    Attributes:
        name: Its entry, or the routine of a library.
        count: Launches.
        seconds: Time on the device, all launches together.
        flops: Floating-point operations done.
        nbytes: Bytes that had to move through device memory at the least.
    """

    name: str
    count: int = 0
    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0

    @property
    def mean(self) -> float:
        """Seconds a launch."""
        return self.seconds / self.count

    @property
    def gflops(self) -> float:
        """GFLOP/s achieved."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gbytes(self) -> float:
        """GB/s achieved, as if each byte that had to move moved once."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """What a profiler has seen.

    Attributes:
        kernels: One entry for each kernel, the most costly first.
        runs: Seconds of each whole run as the host sees it, from `Executor.run` being called to its return.
        uploads, downloads: Copies between host and device since the profiler was made.
    """

    kernels: tuple[KernelProfile, ...]
    runs: tuple[float, ...]
    uploads: Traffic
    downloads: Traffic


class Profiler:
    """Measures the runs of an executor.

    Make it before the inputs, and copy the outputs before the summary, and the copies are counted too.
    """

    def __init__(self, executor: Executor) -> None:
        if not isinstance(executor, Executor):
            raise InputError(
                f"given a {type(executor).__name__}, expected an Executor; Executor(program) makes one of a program"
            )
        self._executor = executor
        self._transfers = executor.device.backend.transfers
        self._before = deepcopy(self._transfers)
        self._kernels: dict[str, KernelProfile] = {}
        self._runs: list[float] = []

    def run(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> dict[str, NPUBuffer]:
        """Runs the program as `Executor.run` does, twice: as a whole, then step by step, each step timed by the device.

        A state that the program updates in place is updated once: the first run has a copy of it.

        Returns:
            The outputs by name.

        Raises:
            NPUError: As `Executor.run` does.
        """
        spare = {name: self._spare(name, buffer) for name, buffer in inputs.items()}
        started = perf_counter()
        self._executor.run(spare, weights)
        elapsed = perf_counter() - started
        outputs, seconds = self._executor.run_timed(inputs, weights)
        self._runs.append(elapsed)
        for step, duration in zip(self._executor.plan.calls, seconds, strict=True):
            self._add(step, duration)
        return outputs

    def profile(self) -> Profile:
        """All that was measured so far."""
        return Profile(
            kernels=tuple(sorted(self._kernels.values(), key=lambda kernel: -kernel.seconds)),
            runs=tuple(self._runs),
            uploads=self._transfers.uploads.since(self._before.uploads),
            downloads=self._transfers.downloads.since(self._before.downloads),
        )

    def print_summary(self) -> None:
        """Prints a table: total, count and mean of each kernel, the transfers, the whole run."""
        from rich.console import Console

        Console(markup=False, emoji=False).print(_table(self.profile()))

    def _spare(self, name: str, buffer: Any) -> Any:
        """A copy of an input that the program updates in place; any other input as it is."""
        if name not in {source for _, source in self._executor.plan.state} or not isinstance(buffer, NPUBuffer):
            return buffer
        data = buffer.device.backend.allocate(buffer.nbytes)
        with data.writing() as memory:
            memory[:] = buffer.data.reading()
        return NPUBuffer(buffer.device, data, buffer.spec)

    def _add(self, step: Call, seconds: float) -> None:
        name = _name(step, self._executor.plan)
        kernel = self._kernels.setdefault(name, KernelProfile(name))
        kernel.count += 1
        kernel.seconds += seconds
        kernel.flops += step.flops
        kernel.nbytes += step.nbytes


def _name(step: Call, plan: ExecutionPlan) -> str:
    return plan.kernels[step.kernel].entry if isinstance(step, KernelCall) else step.routine


def _table(profile: Profile) -> object:
    from rich.table import Table

    table = Table(title="profile", title_justify="left")
    table.add_column("")
    for heading in ("total ms", "count", "mean ms", "GFLOP/s", "GB/s"):
        table.add_column(heading, justify="right")
    for kernel in profile.kernels:
        table.add_row(
            kernel.name, *_times(kernel.seconds, kernel.count), f"{kernel.gflops:.1f}", f"{kernel.gbytes:.1f}"
        )
    table.add_section()
    table.add_row("kernels", *_times(sum(k.seconds for k in profile.kernels), sum(k.count for k in profile.kernels)))
    for name, traffic in (("to the device", profile.uploads), ("from the device", profile.downloads)):
        rate = traffic.nbytes / traffic.seconds / 1e9 if traffic.seconds else 0.0
        table.add_row(name, *_times(traffic.seconds, traffic.count), "", f"{rate:.1f}")
    table.add_row("whole run", *_times(sum(profile.runs), len(profile.runs)))
    return table


def _times(seconds: float, count: int) -> tuple[str, str, str]:
    mean = seconds / count if count else 0.0
    return f"{seconds * 1e3:.3f}", str(count), f"{mean * 1e3:.3f}"
