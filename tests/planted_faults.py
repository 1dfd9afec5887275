"""Plants small faults, one at a time, in a copy of the repository, and tells which of them no test notices.

Run it as ``python -m tests.planted_faults --count 60``. It takes the time of as many runs of the tests, which stop at
the first failure. What is committed is what is copied; nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# What is changed, and the tests that ought to notice it.
PLACES = {
    "npu_compiler/**/*.py": ("tests/compiler", "tests/compiler_core", "tests/golden", "tests/artifact", "tests/ops"),
    "npu_compiler/frontend/*.py": ("tests/extract", "tests/language"),
    "npu_compiler/partitioning/*.py": ("tests/partition",),
    "npu_runtime/*.py": ("tests/runtime", "tests/api", "tests/language", "tests/partition"),
    "software_gpu/*.py": ("tests/software_gpu", "tests/metal"),
    "cuda_compiler/**/*.py": ("tests/cuda", "tests/golden"),
    "metal_compiler/**/*.py": ("tests/metal", "tests/golden", "tests/ops"),
    "metal_compiler/kernels/*.metal": ("tests/metal", "tests/ops"),
}
_COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"}
_IN_KERNELS = ((r" < ", " <= "), (r" \+ 1\b", ""), (r" && ", " || "), (r" \* ", " + "))


_SECONDS_OF_A_TEST = 240


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    """Ends a test that hangs. This script names itself as a plugin of the tests that it runs."""
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(_SECONDS_OF_A_TEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _end(number: int, frame: object) -> None:
    raise TimeoutError(f"the test took more than {_SECONDS_OF_A_TEST} seconds")


class Fault(NamedTuple):
    """A piece of a file, and what takes its place."""

    path: str
    start: int
    end: int
    text: str

    def describe(self, source: str) -> str:
        line = source.count("\n", 0, self.start) + 1
        return f"{self.path}:{line}: {source[self.start : self.end]!r} -> {self.text!r}"


def faults_in(path: str, source: str) -> Iterator[Fault]:
    """All faults that can be planted in a file."""
    if path.endswith(".py"):
        yield from _python_faults(path, source)
        return
    for pattern, text in _IN_KERNELS:
        for match in re.finditer(pattern, source):
            yield Fault(path, match.start(), match.end(), text)


def _python_faults(path: str, source: str) -> Iterator[Fault]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        assert left.end_lineno is not None
        assert left.end_col_offset is not None
        return starts[left.end_lineno - 1] + left.end_col_offset, starts[right.lineno - 1] + right.col_offset

    if not source.isascii():  # columns count bytes
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            start, end = between(node.left, node.comparators[0])
            yield Fault(path, start, end, f" {_COMPARISONS[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            start, end = between(node.left, node.right)
            if source[start:end].strip() in {"+", "-", "*", "//"}:  # no parenthesis between them
                yield Fault(path, start, end, f" {_ARITHMETIC[type(node.op)]} ")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, metavar="N", help="goes on with the Nth fault of the seed")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of the tests for one fault")
    parser.add_argument("--jobs", default="2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        copy = Path(folder, "copy")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        untouched = _outcome(copy, ("tests/architecture", "tests/compiler_core"), args)
        if untouched[0] != "not noticed":
            raise SystemExit(f"tests fail where no fault was planted{untouched[1]}")
        survivors = _run(copy, random.Random(args.seed), args)
    tried = args.count - args.first + 1
    print(f"{tried - len(survivors)} of {tried} were noticed")
    for survivor in survivors:
        print(survivor)


def _run(copy: Path, rng: random.Random, args: argparse.Namespace) -> list[str]:
    """Plants faults; gives those that no test noticed, or not in time."""
    files = [(path, tests) for pattern, tests in PLACES.items() for path in sorted(copy.glob(pattern))]
    survivors: list[str] = []
    drawn: set[Fault] = set()
    for number in range(args.count):
        faults: list[Fault] = []
        while not faults:
            path, tests = rng.choice(files)
            source = path.read_text(encoding="utf-8")
            faults = [fault for fault in faults_in(str(path.relative_to(copy)), source) if fault not in drawn]
        fault = rng.choice(faults)
        drawn.add(fault)
        if number + 1 < args.first:
            continue
        path.write_text(source[: fault.start] + fault.text + source[fault.end :], encoding="utf-8")
        outcome, by = _outcome(copy, tests, args)
        path.write_text(source, encoding="utf-8")
        said = f"{outcome}: {fault.describe(source)}"
        print(f"{number + 1}: {said}{by}", flush=True)
        survivors += [] if outcome == "noticed" else [said]
    return survivors


def _outcome(copy: Path, tests: tuple[str, ...], args: argparse.Namespace) -> tuple[str, str]:
    """``noticed``, ``not noticed``, or ``out of time``: a fault that hangs, or tests that take too long.

    And the test that noticed it: where that is the same one again and again, the test is at fault.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", args.jobs, "-p", "no:cacheprovider"]
    command += ["-p", "tests.planted_faults", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # the copy, not what is installed
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=args.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "out of time", ""
    if not done.returncode:
        return "not noticed", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "noticed", f" (by {failed[0]})" if failed else f" ({(done.stdout + done.stderr)[-200:]!r})"


if __name__ == "__main__":
    main()
