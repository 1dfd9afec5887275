"""The end from which a launch over images takes its tiles."""

from __future__ import annotations

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering

__all__ = ["backwards"]


def backwards(image: Operand, lowering: Lowering) -> int:
    """1 where a launch takes its tiles from the last to the first, as every second one does; else 0.

    What the launch ahead wrote last is still in the level-2 cache: a launch that begins there reads it before its own
    results take the room.
    """
    number: int = lowering.ask(lambda _, now: len(now.emitted) % 2, image.tensor.index)
    return number
