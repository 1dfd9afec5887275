"""Which functions keep the steps of a loop over threads from being independent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from software_gpu.constants import integer_constants, local_constants
from software_gpu.msl_parser import SourceText, Token
from software_gpu.region_storage import subscripts_are_constant, unrolled_variables
from software_gpu.statement_parser import parse_body
from software_gpu.statements import Declaration, UnknownForm, leaves, names_in, tokens_of

__all__ = ["dependent_functions"]


def dependent_functions(source: SourceText) -> set[str]:
    """Functions (kernels among them) that no loop over threads may be promised to be free of dependences.

    Threads meet in an atomic; a local array that stays in memory is one piece of stack that all steps of the loop use
    in turn, which clang must see for itself. What calls such a function is one.
    """
    functions = [function for overloads in source.functions().values() for function in overloads]
    integers = integer_constants(source.tokens)
    found = {function.name for function in functions if not _keeps_arrays_in_registers(function.body, integers)}
    while True:
        more = {function.name for function in functions if found & {token.text for token in function.body}} - found
        if not more:
            return found
        found |= more


def _keeps_arrays_in_registers(body: Sequence[Token], integers: Mapping[str, int]) -> bool:
    if any("atomic" in token.text for token in body):
        return False
    try:
        statements = parse_body(body)
    except UnknownForm:
        return False
    known = local_constants(statements, integers)
    tokens = [token for statement in statements for token in [*tokens_of(statement), ";"]]
    constants = {*known, *(name for statement in statements for name in unrolled_variables(statement, known))}
    return all(
        subscripts_are_constant(leaf.name, tokens, constants | names_in(leaf.suffix))
        for statement in statements
        for leaf in leaves(statement)
        if isinstance(leaf, Declaration) and leaf.suffix
    )
