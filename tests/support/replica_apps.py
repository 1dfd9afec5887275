"""Applications for processes of their own, which import no more than these need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from tests.support.simulated_engine import SimulatedEngine

__all__ = ["LANES", "nothing", "refused", "simulated"]

LANES = 4


def simulated(seconds: float, failing: str = "") -> Any:
    """A server with a simulated device, which fails when there is a file of that name."""
    from tests.support.serving import END, simulated_app

    engine = _Engine(lanes=LANES, pages=400, page_tokens=16, context=1024)
    engine.chunks, engine.ending, engine.seconds, engine.failing = (32, 128), END, seconds, failing
    return simulated_app(engine)[0]


def nothing() -> Any:
    """Answers nothing."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    return app


def refused() -> Any:
    """None at all."""
    raise InputError("not here")


class _Engine(SimulatedEngine):
    failing = ""

    def _check_call(self, lane: int) -> None:
        self.fails = bool(self.failing) and Path(self.failing).exists()
        super()._check_call(lane)
