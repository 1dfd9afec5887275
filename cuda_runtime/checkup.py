"""What `npu doctor` looks at for CUDA: what is kept between runs."""

from __future__ import annotations

from cuda_runtime.kernel_cache import cache_directory
from cuda_runtime.tuning_results import tuning_directory
from npu_runtime.checkup import Checkup

__all__ = ["CHECKUP"]

CHECKUP = Checkup(caches={"kernel cache of CUDA": cache_directory, "tuning results of CUDA": tuning_directory})
