"""Products that store more than their results: what is made of these for a norm whose factor comes later."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.rows import lower_map
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.row_factors import PART
from npu_compiler.records import changed

__all__ = ["stored_together", "stores_followers", "without_followers"]

_TAKEN = 8  # neighbours of a row that a thread has
_LANES = 4  # whose neighbours follow each other


def stored_together(around: AnchoredGroup) -> int:
    """Results that a thread of such a kernel stores together."""
    return around.pack_size(_TAKEN // around.group.pairs)


def stores_followers(around: AnchoredGroup) -> bool:
    """Whether an epilogue stores all followers that a group has: lanes that do have a part of a row at once."""
    return not around.group.followers or (bool(around.found.followers) and stored_together(around) == PART // _LANES)


def without_followers(around: AnchoredGroup) -> tuple[AnchoredGroup, list[KernelCall]]:
    """A group alone, and the launches that compute its followers behind it."""
    if not around.group.followers:
        return around, []
    alone = AnchoredGroup.of(changed(around.group, followers=()), around.lowering)
    return alone, [call for each in around.group.followers for call in lower_map(each, around.lowering)]
