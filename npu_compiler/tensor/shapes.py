"""Shapes: dimensions by number, broadcasting, and the refusal of what has none."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["OpRefusal", "broadcast_shapes", "normalize_dim"]


class OpRefusal(Exception):
    """Raised by an op's definition, or by a target's lowering, with the reason why it cannot be computed."""


def normalize_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front.

    Raises:
        OpRefusal: There is no such dimension.
    """
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise OpRefusal(f"given dim={dim}, expected one of {rank} dimensions")
    return dim % max(rank, 1)


@lru_cache(4096)  # a model has few shapes
def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that tensors of `shapes` broadcast to.

    Raises:
        OpRefusal: They do not broadcast.
    """
    rank = max(map(len, shapes), default=0)
    result = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        different = {size for size in sizes if size != 1}
        if len(different) > 1:
            raise OpRefusal(f"the shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(different.pop() if different else 1)
    return tuple(result)
