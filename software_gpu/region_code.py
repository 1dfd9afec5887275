"""Writes the C++ of a kernel in region form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from software_gpu.constants import integer_constants, local_constants
from software_gpu.entry_points import builtin_value, entry_signature, group_loop, shared_arguments
from software_gpu.helpers import helpers_of
from software_gpu.msl_parser import BUILTINS, Kernel, SourceText
from software_gpu.region_lanes import SIMDGROUP_ROWS, X_ROWS, LaneCode
from software_gpu.region_pieces import (
    CollectivePiece,
    GroupBlock,
    GroupCode,
    Item,
    Lanes,
    Masked,
    Piece,
    Region,
    RowBlock,
    RowCode,
    RowReturn,
    Strided,
    has_row_return,
    regions_of,
    returns_in_lanes,
)
from software_gpu.region_storage import Home, plan_storage
from software_gpu.region_text import plain_type
from software_gpu.regions import split_into_regions
from software_gpu.statement_parser import parse_body
from software_gpu.statements import Declaration, Simple, Statement, UnknownForm, names_in, tokens_of
from software_gpu.translation import ThreadgroupVariable, place_variables, synchronizes
from software_gpu.variables import BARRIERS, COLLECTIVES, ROW, analyse, is_matrix_name, is_threadgroup_variable

__all__ = ["region_entry", "region_shape"]

_SIMDGROUP_ROLES = {
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
}


def region_entry(kernel: Kernel, source: SourceText, synchronizing: set[str], dependent: set[str]) -> str:
    """The entry of a kernel's region form.

    Args:
        synchronizing: Functions that synchronise threads inside; their statements stand in place of their calls.
        dependent: Functions that keep the steps of a loop over lanes from being independent.

    Raises:
        UnknownForm: The kernel has no region form; run it on fibers.
    """
    functions = source.functions()
    body = parse_body(kernel.body, kernel.parameters, helpers_of(functions, synchronizing - {kernel.name}))
    _check_calls([token for statement in body for token in [*tokens_of(statement), ";"]], synchronizing - {kernel.name})
    integers = local_constants(body, integer_constants(source.tokens))
    callees = {
        name: {position for function in overloads for position in function.changed_arguments()}
        for name, overloads in functions.items()
    }
    variables = analyse(kernel, body, callees)
    items = split_into_regions(body, variables, integers)
    storage = plan_storage(items, variables, integers)
    nest = SIMDGROUP_ROWS if region_shape(kernel, source) == "simdgroups" else X_ROWS
    return _RegionCode(variables, integers, kernel, storage, nest, dependent - {kernel.name}).entry(items)


def _check_calls(tokens: Sequence[str], synchronizing: set[str]) -> None:
    """What synchronises threads is what the pieces are made for."""
    for token, after in itertools.pairwise(tokens):
        unknown = after == "(" and synchronizes(token) and token not in BARRIERS and token not in COLLECTIVES
        if token in synchronizing or (unknown and not is_matrix_name(token)):
            raise UnknownForm(f"threads synchronise in '{token}'")


def region_shape(kernel: Kernel, source: SourceText) -> str:
    """What a row is: ``simdgroups``, for threadgroups in one dimension, or ``x_rows``.

    Simdgroups and what they do together need simdgroups for rows. A kernel that asks for its place in two or three
    dimensions and needs none of them is better off with rows along x.
    """
    bodies = [kernel.body, *(function.body for function in source.called_by(kernel))]
    together = any(token.text in COLLECTIVES or is_matrix_name(token.text) for body in bodies for token in body)
    roles = {parameter.role for parameter in kernel.parameters}
    places = {"thread_position_in_grid", "thread_position_in_threadgroup"}
    flat = all(p.type in {"uint", "ushort"} for p in kernel.parameters if p.role in places)
    return "simdgroups" if together or flat or roles & _SIMDGROUP_ROLES else "x_rows"


@dataclass
class _RegionCode(LaneCode):
    """The whole: what a threadgroup, a row and a lane run."""

    region: int = -1
    threadgroup_end: str = "0"
    uses_live: bool = False
    uses_live_rows: bool = False

    # --- the whole ---

    def entry(self, items: Sequence[Item]) -> str:
        self.uses_live = any(returns_in_lanes(piece) for region in regions_of(items) for piece in region.pieces)
        self.uses_live_rows = any(has_row_return(piece) for region in regions_of(items) for piece in region.pieces)
        self._group_head()
        for item in items:
            self._item(item)
        body = "\n".join(self.lines)
        return entry_signature("region", self.kernel) + group_loop(
            shared_arguments(self.kernel), f"[&]() MSL_LAMBDA {{\n{body}\n    }}();"
        )

    def _group_head(self) -> None:
        self.line("unsigned char* const msl_threadgroup = msl_w->threadgroup_memory; (void)msl_threadgroup;")
        self.line(self.nest.head)
        for parameter in self.kernel.parameters:
            if parameter.role in BUILTINS and self.variables.levels.get(parameter.name, 0) < ROW:
                self.line(f"const {parameter.type} {parameter.name} = {builtin_value(parameter)};")
        for name, home in self.storage.homes.items():
            if home is Home.GROUP:
                self.line(self._array(name, "msl::storage_stride" if self.is_lane(name) else self.nest.rows))
        if self.uses_live:
            self.line("bool msl_live[msl::max_threads]; for (bool& live : msl_live) live = true;")
        if self.uses_live_rows:
            self.line("bool msl_live_rows[msl::max_threads]; for (bool& live : msl_live_rows) live = true;")

    def _array(self, name: str, stride: str) -> str:
        """Storage for one variable of many threads: elements apart, or one value behind the other."""
        declaration = self.storage.declarations[name]
        kind, suffix = plain_type(declaration), " ".join(declaration.suffix)
        alias = f"typedef {kind} msl_type_{name}{suffix};"
        if name in self.storage.spread:
            count = f"msl::spread_shape<msl_type_{name}>::count"
            return f"{alias} alignas(64) {kind} msl_all_{name}[{count} * {stride}];"
        return f"{alias} alignas(64) msl_type_{name} msl_all_{name}[{stride}];"

    def _item(self, item: Item) -> None:
        match item:
            case GroupCode(statement):
                self._group_code(statement)
            case GroupBlock(head, body, otherwise):
                self.open(head)
                for inner in body:
                    self._item(inner)
                if otherwise:
                    self.reopen_else()
                    for inner in otherwise:
                        self._item(inner)
                self.close()
            case Region(pieces):
                self.region += 1
                self._region(pieces)

    def _group_code(self, statement: Statement) -> None:
        if isinstance(statement, Declaration) and is_threadgroup_variable(statement):
            kind = " ".join(token for token in statement.type if token != "threadgroup")
            variable = ThreadgroupVariable(statement.name, kind, " ".join(statement.suffix))
            text, self.threadgroup_end = place_variables([variable], self.threadgroup_end)
            self.line(text)
        else:
            self.statement(statement)

    # --- rows ---

    def _region(self, pieces: Sequence[Piece]) -> None:
        self.line("for (uint msl_s = 0; msl_s < msl_rows; ++msl_s) [&]() MSL_LAMBDA {")
        self.depth += 1
        self.line("const uint msl_base = msl_s * msl_lanes; (void)msl_base;")
        if self.uses_live_rows:
            self.line("if (!msl_live_rows[msl_s]) return;")
        if self.uses_live:
            self.line("bool* const msl_live_here = msl_live + msl_base;")
            self.masks.append("msl_live_here")
            self._leave_when_none_lives()
        for parameter in self.kernel.parameters:
            if self.variables.levels.get(parameter.name) == ROW:
                self.line(f"const {parameter.type} {parameter.name} = ({parameter.type})msl_s;")
        for name, home in self.storage.homes.items():
            if self.region not in self.storage.users[name]:
                continue
            if home is Home.ROW:
                self.line(self._array(name, self.nest.lanes))
            elif home is Home.GROUP and not self.is_lane(name):
                self.line(f"msl_type_{name}& {name} = msl_all_{name}[msl_s];")
        for piece in pieces:
            self._piece(piece)
        if self.uses_live:
            self.masks.pop()
        self.depth -= 1
        self.line("}();")

    def _piece(self, piece: Piece) -> None:
        match piece:
            case Lanes(statements):
                self.lanes_code(statements)
                if returns_in_lanes(piece):
                    self._leave_when_none_lives()
            case RowCode(statement):
                self._row_code(statement)
            case RowReturn():
                self.line("msl_live_rows[msl_s] = false;")
                self.line("return;")
            case RowBlock(head, body, otherwise):
                self.open(head)
                self._pieces(body)
                if otherwise:
                    self.reopen_else()
                    self._pieces(otherwise)
                self.close()
            case Masked():
                self._masked(piece)
            case Strided():
                self._strided(piece)
            case CollectivePiece():
                self._collective(piece)

    def _pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._piece(piece)

    def _leave_when_none_lives(self) -> None:
        """What a row does once is done for lanes that live."""
        self.line("if (!msl::any_lane(msl_live_here, msl_lanes)) return;")

    def _row_code(self, statement: Declaration | Simple) -> None:
        tokens = tokens_of(statement)
        if any(self.is_lane(name) for name in names_in(tokens)):
            # Of what the lanes have each for themselves, the matrix sees the first lane's: all must agree.
            self.line("{ constexpr uint msl_l = 0;")
            self.depth += 1
            self.lane_names(tokens)
            self.statement(statement)
            self.close()
            return
        stored = isinstance(statement, Declaration) and self.storage.home(statement.name) is Home.GROUP
        self.statement(statement, stored=stored)

    def _masked(self, piece: Masked) -> None:
        self.line(f"bool {piece.mask}[{self.nest.lanes}] = {{}};")
        self.lane_loop(piece.condition, [f"{piece.mask}[msl_l] = ({' '.join(piece.condition)});"], vectorize=True)
        self._under_mask(piece.mask, piece.body)
        if piece.otherwise:
            inverse = f"{piece.mask}_else"
            self.line(f"bool {inverse}[{self.nest.lanes}] = {{}};")
            self.lane_loop([], [f"{inverse}[msl_l] = !{piece.mask}[msl_l];"], vectorize=True)
            self._under_mask(inverse, piece.otherwise)

    def _under_mask(self, mask: str, pieces: Sequence[Piece]) -> None:
        self.line(f"if (msl::any_lane({mask}, msl_lanes)) {{")
        self.depth += 1
        self.masks.append(mask)
        self._pieces(pieces)
        self.masks.pop()
        self.close()

    def _strided(self, piece: Strided) -> None:
        """The row's lanes step together; the last steps may be too far for some of them."""
        name, kind = piece.variable.name, plain_type(piece.variable)
        bound, step = " ".join(piece.bound), " ".join(piece.step)
        self.line(f"for ({kind} msl_offset_{name} = 0;; msl_offset_{name} += ({step})) {{")
        self.depth += 1
        self.strided[name] = piece
        self.line(f"uint msl_count_{name} = 0;")
        counted = [f"msl_count_{name} += {name} < ({bound});"]
        self.lane_loop([name, *piece.bound], counted, vectorize=True, masked=False)
        self.line(f"if (msl_count_{name} == 0) break;")
        self.line(f"const bool msl_full_{name} = msl_count_{name} == msl_lanes;")
        self.masks.append(f"?msl_full_{name} || {name} < ({bound})")
        self._pieces(piece.body)
        self.masks.pop()
        del self.strided[name]
        self.close()

    def _collective(self, piece: CollectivePiece) -> None:
        argument, values = f"msl_argument_of_{piece.name}", f"msl_values_of_{piece.name}"
        operands, kind = f"msl_operands_of_{piece.name}", f"msl_type_of_{piece.name}"
        self.line(f"auto {argument} = [&](uint msl_l) MSL_LAMBDA {{")
        self.depth += 1
        self.lane_names([*piece.argument, *piece.operand])
        self.line(f"return ({' '.join(piece.argument)});")
        self.depth -= 1
        self.line("};")
        self.line(f"typedef decltype({argument}(0u)) {kind};")
        self.line(f"alignas(64) {kind} {values}[msl::simd_width]; uint {operands}[msl::simd_width]; (void){operands};")
        work = [f"{values}[msl_l] = {argument}(msl_l);"]
        if piece.operand:
            work.append(f"{operands}[msl_l] = (ushort)({' '.join(piece.operand)});")
        self.lane_loop(piece.operand, work, vectorize=True)
        active = f"msl::active_lanes({', '.join(self.masks)})" if self.masks else "~0u"
        self.line(f"msl::{piece.collective.operation}::apply({values}, {operands}, {active});")
        if piece.collective.level == ROW:
            self.line(f"const {kind} {piece.name} = {values}[0];")
