"""What the CUDA benchmarks share: times, PyTorch's ways to do the same work, ceilings, and results as JSON and table.

A time is a median over replays, each between two events of the device. Results are a list of runs: what one process
measured, side by side, with its machine and its ceilings. A workload that is measured again leaves its older run.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from npu_runtime import Device

__all__ = [
    "PEERS",
    "Expired",
    "Peers",
    "add_arguments",
    "best_peer",
    "ceilings",
    "channels_last",
    "empty_run",
    "machine",
    "milliseconds",
    "pearson",
    "print_table",
    "repeated_milliseconds",
    "shares",
    "time_limit",
    "write_run",
]

PEERS = {
    "eager": "PyTorch eager",
    "captured": "PyTorch eager, captured in a CUDA graph",
    "compiled": "torch.compile, captured in a CUDA graph",
    "autotuned": "torch.compile with max-autotune, captured in a CUDA graph",
}
_OPTIONS: dict[str, dict[str, str | int | bool | Callable[..., object]]] = {
    "compiled": {},
    # max-autotune, but for other kernels than cuDNN's for convolutions: 18 candidates of each take minutes to try
    "autotuned": {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_conv_backends": "ATEN"},
}
_WARM_UP = 10
_REPLAYS = 40
_ROUNDS = 3
_COPIED = 1 << 32  # bytes, far beyond the level-2 cache
_PRODUCT = 8192
_COLUMNS = 8  # of a printed table

Compared = Callable[[torch.Tensor], Mapping[str, Any]]
"""How a peer's output compares with the reference: figures by name."""


def add_arguments(parser: argparse.ArgumentParser, peers: Sequence[str] = tuple(PEERS)) -> None:
    """The options that all of these benchmarks have; `peers` are those to compare with by default."""
    ways = "; ".join(f"{name}: {text}" for name, text in PEERS.items())
    parser.add_argument("--peers", nargs="*", default=list(peers), choices=list(PEERS), help=ways)
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="for torch.compile, each time (default: 60)"
    )
    parser.add_argument("--tune", action="store_true", help="tune this project's programs first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """An image as both sides like it best; what has not four dimensions as it is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def pearson(given: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Correlation of all elements, in float64."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (given, wanted))
    return float(np.corrcoef(a, b)[0, 1])


def milliseconds(replay: Callable[[], object], stream: int | None = None) -> float:
    """Median time of a replay on a stream, PyTorch's own when not given."""
    return float(median(_times(replay, stream)))


def _times(replay: Callable[[], object], stream: int | None = None) -> list[float]:
    on = torch.cuda.current_stream() if stream is None else torch.cuda.ExternalStream(stream)
    for _ in range(_WARM_UP):
        replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(on)
        replay()
        end.record(on)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def repeated_milliseconds(replay: Callable[[], object], stream: int | None = None) -> dict[str, float]:
    """The median of several medians, and the least and greatest of them: what another run may differ by."""
    medians = sorted(milliseconds(replay, stream) for _ in range(_ROUNDS))
    return {"npu": float(median(medians)), "npu, least": medians[0], "npu, greatest": medians[-1]}


class Peers:
    """PyTorch's ways to call one function on the same arguments, prepared once and run as often as wished."""

    def __init__(
        self,
        names: Sequence[str],
        function: Callable[..., torch.Tensor],
        arguments: Sequence[Any],
        limit: float,
    ) -> None:
        """Compiles and captures.

        Args:
            names: Of `PEERS`.
            function: What all of them run, under inference mode.
            arguments: What they run it on: always what lies in these tensors then.
            limit: Seconds that compilation may take. What is not compiled by then is not timed, and said to be so.
        """
        self._limit = limit
        self._calls: dict[str, Callable[[], torch.Tensor] | None] = {}
        self._seconds: dict[str, float] = {}
        for name in names:
            start = perf_counter()
            self._calls[name] = _prepared(name, function, arguments, limit)
            self._seconds[name] = perf_counter() - start

    def figures(self, names: Sequence[str], compared: Compared) -> dict[str, Any]:
        """Each peer's comparison with the reference and its time in milliseconds, None where it was not compiled."""
        figures: dict[str, Any] = {}
        for name in names:
            call = self._calls[name]
            if call is None:
                figures |= {name: None, f"{name}, not compiled within, s": self._limit}
                continue
            figures |= {f"{name}, {key}": value for key, value in compared(call()).items()}
            figures |= {f"{name}, prepared in, s": self._seconds[name], name: milliseconds(call)}
        return figures


def best_peer(figures: Mapping[str, Any]) -> dict[str, float]:
    """The ratio of this project's time to the best peer's, if there is one."""
    times = [figures[peer] for peer in PEERS if figures.get(peer) is not None]
    return {"ratio to the best peer": figures["npu"] / min(times)} if times else {}


def _prepared(
    peer: str, function: Callable[..., torch.Tensor], arguments: Sequence[Any], limit: float
) -> Callable[[], torch.Tensor] | None:
    """What runs a peer once more and gives its output; None if it is not compiled in time."""
    called = function
    if peer in _OPTIONS:
        torch._dynamo.reset()
        called = torch.compile(function, options=_OPTIONS[peer])

    def once() -> torch.Tensor:
        with torch.inference_mode():
            return called(*arguments)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side), time_limit(limit):
            for _ in range(3):
                once()
    except Expired:
        return None
    torch.cuda.current_stream().wait_stream(side)
    if peer == "eager":
        return once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = once()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


class Expired(BaseException):
    """A time limit is over. No `Exception`, because torch.compile catches those and goes on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Expired` in this, the main thread where the block takes longer."""

    def expire(*_: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """The most that this machine reaches: traffic of a copy, reading by a matrix-vector product, a large product."""
    figures = {
        "copy, GB/s": _copy_rate(),
        "matrix-vector product, GB/s": _reading_rate(dtype),
        "matmul, TFLOP/s": _product_rate(dtype),
    }
    torch.cuda.empty_cache()
    return figures


def _copy_rate() -> float:
    """Bytes read and written counted."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(_times(lambda: target.copy_(source))) / 1e6


def _reading_rate(dtype: torch.dtype) -> float:
    matrix = torch.randn(1 << 18, 1 << 14, dtype=dtype, device="cuda")
    vector = torch.randn(1 << 14, dtype=dtype, device="cuda")
    return matrix.nbytes / min(_times(lambda: matrix @ vector)) / 1e6


def _product_rate(dtype: torch.dtype) -> float:
    left, right = (torch.randn(_PRODUCT, _PRODUCT, dtype=dtype, device="cuda") for _ in range(2))
    return 2 * _PRODUCT**3 / min(_times(lambda: left @ right)) / 1e9


def shares(milliseconds: float, nbytes: int, flops: int, measured: Mapping[str, float]) -> dict[str, float]:
    """Rates of some work, and how much of the ceilings they are."""
    read, multiplied = nbytes / milliseconds / 1e6, flops / milliseconds / 1e9
    bandwidth = max(measured["copy, GB/s"], measured["matrix-vector product, GB/s"])
    return {
        "GB/s": read,
        "share of the memory bandwidth": read / bandwidth,
        "TFLOP/s": multiplied,
        "share of the matmul ceiling": multiplied / measured["matmul, TFLOP/s"],
    }


def empty_run(device: Device, measured: Mapping[str, float], tuned: bool) -> dict[str, Any]:
    """A run without results yet.

    Args:
        device: What it runs on.
        measured: The ceilings there.
        tuned: Whether this project's programs are tuned.
    """
    return {"machine": machine(device), "tuned": tuned, "ceilings": dict(measured), "results": []}


def machine(device: Device) -> dict[str, str]:
    """The device, today's date, and versions."""
    return {
        "device": device.backend.name,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def write_run(path: Path | None, run: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Puts a run into a file of results; rows of other runs for the same workloads, told apart by `keys`, leave it.

    A run that is written again while it grows replaces itself, so that one stopped early leaves what it measured.
    """
    if path is None:
        return

    def workload(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in keys)

    measured = {workload(row) for row in run["results"]}
    runs = []
    for other in json.loads(path.read_text())["runs"] if path.exists() else []:
        kept = [row for row in other["results"] if workload(row) not in measured]
        runs += [{**other, "results": kept}] if kept else []
    path.write_text(json.dumps({"runs": [*runs, run]}, indent=2) + "\n")


def print_table(run: Mapping[str, Any], keys: Sequence[str]) -> None:
    """A column for each workload, named by the values of `keys`; several tables where there are many."""
    rows = run["results"]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in keys]
    for first in range(0, len(rows), _COLUMNS):
        table = Table(title=", ".join(run["machine"].values()))
        table.add_column("; ".join(f"{name}: {value:.0f}" for name, value in run["ceilings"].items()))
        shown = rows[first : first + _COLUMNS]
        for row in shown:
            table.add_column(", ".join(str(row[key]) for key in keys), justify="right")
        for name in names:
            table.add_row(name, *(_text(row.get(name, "")) for row in shown))
        Console(width=180).print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}" if 0.99 < value < 1 else f"{value:.3f}"
    return "-" if value is None else str(value)
