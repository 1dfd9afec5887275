"""A server with a simulated device as a process of its own, which tells what it holds: `python -m` of this module.

It prints its address, then a line of JSON for each line that it reads: when all that was asked for is over, what there
is. When nothing more can be read it stops, and prints the threads that are left.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from npu_text.batching.pages import PageTable
from npu_text.batching.texts import Text, TextRequest
from npu_text.serving.answers import Answer, Answers
from npu_text.serving.chat import Chat
from npu_text.serving.completions import Completion
from npu_text.serving.replies import EventStream
from tests.support.serving import END, Server, serve
from tests.support.simulated_engine import SimulatedEngine

__all__ = ["main", "resident_bytes"]

_OF_REQUESTS = (Text, TextRequest, PageTable, Answer, Answers, Chat, Completion, EventStream)
_SECONDS = 30.0


def main() -> None:
    """Serves until standard input ends."""
    engine = SimulatedEngine(lanes=16, pages=160, page_tokens=16, context=512)
    engine.chunks, engine.ending = (32, 128), END
    with serve(engine) as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps(_held(server)), flush=True)
    print(json.dumps(sorted(thread.name for thread in threading.enumerate())), flush=True)


def _held(server: Server) -> dict[str, Any]:
    """What there is, when nothing is left to be done or it did not end."""
    driver, until = server.service.core.driver, time.monotonic() + _SECONDS
    while time.monotonic() < until:
        gc.collect()
        objects = gc.get_objects()
        kinds = Counter(kind.__name__ for each in objects if (kind := type(each)) in _OF_REQUESTS)
        tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in objects)
        status = driver.status()
        held = {
            "resident_bytes": resident_bytes(os.getpid()),
            "objects": len(objects),
            "of_requests": dict(kinds),
            "tasks": tasks,
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/dev/fd")),
            "open": server.service.core.open,
            "waiting": status.waiting,
            "lanes": sum(lane is not None for lane in status.lanes),
            "used_pages": status.used_pages,
            "pages": status.pages,
            "available_pages": driver.scheduler.pool.available,
            "finished": dict(driver.scheduler.counters.finished),
        }
        del objects
        if not (kinds or held["open"] or held["waiting"] or held["lanes"] or held["used_pages"]):
            break
        time.sleep(0.1)
    return held


def resident_bytes(process: int) -> int:
    """What a process holds in memory, given its number."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True)
        return int(told.stdout) * 1024


if __name__ == "__main__":
    main()
