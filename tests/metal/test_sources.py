"""What Python and the kernel files for Metal agree on beside their templates."""

from __future__ import annotations

import re

from metal_compiler.skeleton import KERNELS
from metal_compiler.tiles.tiling import GROUP


def test_results_stored_together() -> None:
    (size,) = re.findall(r"int GROUP = (\d+);", KERNELS.file("store.metal"))
    assert int(size) == GROUP
