"""What a process of the tests is told by its environment, before it imports anything that reads it."""

from __future__ import annotations

import os
import sys

__all__: list[str] = []

# Several processes share the machine, and tensors are small: threads that wait for a part of one spin meanwhile.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Tests start Python a hundred times. Each would translate all sources anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
