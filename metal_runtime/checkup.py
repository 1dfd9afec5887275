"""What `npu doctor` looks at for the software GPU: its compiler, processor, arithmetic, kernels, process and cache."""

from __future__ import annotations

from collections.abc import Iterator

from npu_compiler.errors import NPUError
from npu_runtime.checkup import Checkup, Finding
from software_gpu import cache
from software_gpu.device_process import isolation
from software_gpu.probe import check_storage_types, instructions, kept_fallbacks, repair, slow_kernels_reason
from software_gpu.toolchain import find_toolchain

__all__ = ["CHECKUP"]

_REPAIR = "`npu doctor --repair` has them compiled anew"


def _findings(opens: bool) -> Iterator[Finding]:
    """What the software GPU is made of; where it opens, it must also compute."""
    subject = "compiler of the software GPU"
    try:
        yield Finding(subject, True, find_toolchain().description)
        subject = "processor of the software GPU"
        yield Finding(subject, True, instructions())
        subject = "arithmetic of the software GPU"
        yield Finding(subject, True, f"right in {check_storage_types()}")
        subject = "kernels of the software GPU"
        reason = slow_kernels_reason()
    except NPUError as error:
        yield Finding(subject, False, str(error), fails=opens)
        return
    kept = kept_fallbacks()
    if reason:
        yield Finding(subject, False, f"on fibers, slowly; the compiler refused loops: {reason}. {_REPAIR}")
    elif kept:
        yield Finding(subject, False, f"{len(kept)} in the cache run on fibers, slowly: {kept[0]}. {_REPAIR}")
    else:
        yield Finding(subject, True, "as loops that are vectorised")
    subject = "process of the software GPU"
    try:
        yield Finding(subject, True, f"kernels run {isolation()}")
    except NPUError as error:
        yield Finding(subject, False, str(error), fails=opens)


def _repair() -> str:
    return f"{repair()} damaged or refused kernels dropped from {cache.cache_directory()}"


CHECKUP = Checkup(_findings, {"kernel cache of the software GPU": cache.cache_directory}, _repair)
