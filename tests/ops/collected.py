"""The cases of all families: those of every module ``*_cases`` beside this one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.ops.cases import Case

__all__ = ["CASES", "COMPUTED"]

_FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py"))
CASES: list[Case] = [case for family in _FAMILIES for case in import_module(f"tests.ops.{family}").CASES]
COMPUTED = [case for case in CASES if not case.refusal]
