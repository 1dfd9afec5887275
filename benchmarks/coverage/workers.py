"""Tries models in processes of their own, several at a time, each with a limit of time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from benchmarks.coverage.trial import Request

__all__ = ["try_models"]

_LAST_WORDS = 5.0  # seconds for a process to end by itself


@dataclass
class _Running:
    name: str
    process: BaseProcess
    answers: Connection
    deadline: float


def try_models(names: Sequence[str], request: Request, jobs: int, limit: float) -> Iterator[dict[str, Any]]:
    """The records of models, as they are done.

    Args:
        names: As the catalogue has them.
        request: What is asked of each.
        jobs: Processes at a time.
        limit: Seconds that one model may take.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.coverage.worker"])  # imports once what takes seconds
    waiting = list(reversed(names))
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(context, waiting.pop(), request, jobs, limit))
        wait([each.answers for each in running], timeout=max(0.0, min(each.deadline for each in running) - monotonic()))
        for each in list(running):
            record = _record(each, limit)
            if record is not None:
                running.remove(each)
                yield record


def _start(context: Any, name: str, request: Request, jobs: int, limit: float) -> _Running:
    from benchmarks.coverage.worker import work

    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, request, jobs, sending), daemon=True)
    process.start()
    sending.close()
    return _Running(name, process, receiving, monotonic() + limit)


def _record(each: _Running, limit: float) -> dict[str, Any] | None:
    """What a process answered, or what became of it; None while it works."""
    record: dict[str, Any] | None = None
    if each.answers.poll():
        try:
            record = each.answers.recv()
        except EOFError:
            each.process.join(_LAST_WORDS)
            record = _failed(each.name, "ProcessEnded", f"its process ended with code {each.process.exitcode}")
    elif monotonic() > each.deadline:
        record = _failed(each.name, "TimeLimit", f"it took more than {limit:g} s")
    if record is not None:
        each.process.join(_LAST_WORDS if record.get("status") != "stopped" else 0)
        if each.process.is_alive():
            each.process.kill()
            each.process.join()
        each.answers.close()
    return record


def _failed(name: str, kind: str, message: str) -> dict[str, Any]:
    return {"name": name, "status": "stopped", "error": {"type": kind, "message": message}, "seconds": {}}
