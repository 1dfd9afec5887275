"""Writes the C++ of a kernel in region form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from software_gpu.constants import integer_constants, local_constants, own_trips
from software_gpu.entry_points import builtin_value, entry_signature, group_loop, shared_arguments
from software_gpu.msl_parser import BUILTINS, Kernel, SourceText
from software_gpu.region_storage import (
    UNROLLED_TRIPS,
    Home,
    Storage,
    plan_storage,
    subscripts_are_constant,
    unrolled_variables,
)
from software_gpu.regions import (
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
    split_into_regions,
)
from software_gpu.statements import (
    Block,
    Declaration,
    For,
    If,
    Simple,
    Statement,
    UnknownForm,
    While,
    leaves,
    names_in,
    parse_body,
    tokens_of,
)
from software_gpu.translation import ThreadgroupVariable, place_variables
from software_gpu.variables import COLLECTIVES, LANE, ROW, Variables, analyse, is_matrix_name

__all__ = ["region_entry", "region_shape"]

_INDENT = "  "


@dataclass(frozen=True)
class _Nest:
    """How threads make rows.

    Attributes:
        head: Declarations of the number of rows and lanes.
        place: A lane's place in its threadgroup.
        lanes: Constant that holds a row's lanes, for arrays.
        rows: Constant that holds a group's rows.
    """

    head: str
    place: str
    lanes: str
    rows: str


_SIMDGROUP_ROWS = _Nest(
    head="constexpr uint msl_lanes = msl::simd_width; const uint msl_rows = msl_nx / msl_lanes;",
    place="const uint msl_x = msl_index, msl_y = 0, msl_z = 0;",
    lanes="msl::simd_width",
    rows="msl::simd_width",
)
_X_ROWS = _Nest(
    head="const uint msl_lanes = msl_nx, msl_rows = msl_ny * msl_nz;",
    place="const uint msl_x = msl_l, msl_y = msl_s % msl_ny, msl_z = msl_s / msl_ny;",
    lanes="msl::storage_stride",
    rows="msl::max_threads",
)
_SIMDGROUP_ROLES = {
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
}
# The product of two matrices is unrolled already; more of it would only be slower to compile.
_MATRIX_LOOP, _SHORT_LOOP = '_Pragma("nounroll") ', '_Pragma("unroll") '


def region_entry(kernel: Kernel, source: SourceText, synchronizing: set[str], dependent: set[str]) -> str:
    """The entry of a kernel's region form.

    Args:
        synchronizing: Functions that synchronise threads inside; a call of one can't be split.
        dependent: Functions that keep the steps of a loop over lanes from being independent.

    Raises:
        UnknownForm: The kernel has no region form; run it on fibers.
    """
    functions = source.functions()
    if {token.text for token in kernel.body} & synchronizing & functions.keys() - {kernel.name}:
        raise UnknownForm("a function that synchronises threads")
    body = parse_body(kernel.body, {parameter.name for parameter in kernel.parameters})
    integers = local_constants(body, integer_constants(source.tokens))
    callees = {
        name: {position for function in overloads for position in function.changed_arguments()}
        for name, overloads in functions.items()
    }
    variables = analyse(kernel, body, callees)
    items = split_into_regions(body, variables, integers)
    storage = plan_storage(items, variables, integers)
    nest = _SIMDGROUP_ROWS if region_shape(kernel) == "simdgroups" else _X_ROWS
    return _Writer(kernel, variables, storage, integers, nest, dependent - {kernel.name}).entry(items)


def region_shape(kernel: Kernel) -> str:
    """What a row is: ``simdgroups``, for threadgroups in one dimension, or ``x_rows``.

    Simdgroups and what they do together need simdgroups for rows. A kernel that asks for its place in two or three
    dimensions and needs none of them is better off with rows along x.
    """
    together = any(token.text in COLLECTIVES or is_matrix_name(token.text) for token in kernel.body)
    roles = {parameter.role for parameter in kernel.parameters}
    places = {"thread_position_in_grid", "thread_position_in_threadgroup"}
    flat = all(p.type in {"uint", "ushort"} for p in kernel.parameters if p.role in places)
    return "simdgroups" if together or flat or roles & _SIMDGROUP_ROLES else "x_rows"


@dataclass
class _Writer:
    kernel: Kernel
    variables: Variables
    storage: Storage
    integers: Mapping[str, int]
    nest: _Nest
    dependent: set[str]
    lines: list[str] = field(default_factory=list)
    depth: int = 2
    region: int = -1
    masks: list[str] = field(default_factory=list)
    threadgroup_end: str = "0"
    strided: dict[str, Strided] = field(default_factory=dict)
    uses_live: bool = False
    uses_live_rows: bool = False

    # --- the whole ---

    def entry(self, items: Sequence[Item]) -> str:
        self.uses_live = any(_returns_in_lanes(piece) for region in _all_regions(items) for piece in region.pieces)
        self.uses_live_rows = any(_has_row_return(piece) for region in _all_regions(items) for piece in region.pieces)
        self._group_head()
        for item in items:
            self._item(item)
        body = "\n".join(self.lines)
        return entry_signature("region", self.kernel) + group_loop(
            shared_arguments(self.kernel), f"[&]() MSL_LAMBDA {{\n{body}\n    }}();"
        )

    def _group_head(self) -> None:
        self._line("unsigned char* const msl_threadgroup = msl_w->threadgroup_memory; (void)msl_threadgroup;")
        self._line(self.nest.head)
        for parameter in self.kernel.parameters:
            if parameter.role in BUILTINS and self.variables.levels.get(parameter.name, 0) < ROW:
                self._line(f"const {parameter.type} {parameter.name} = {builtin_value(parameter)};")
        for name, home in self.storage.homes.items():
            if home is Home.GROUP:
                self._line(self._array(name, "msl::storage_stride" if self._is_lane(name) else self.nest.rows))
        if self.uses_live:
            self._line("bool msl_live[msl::max_threads]; for (bool& live : msl_live) live = true;")
        if self.uses_live_rows:
            self._line("bool msl_live_rows[msl::max_threads]; for (bool& live : msl_live_rows) live = true;")

    def _array(self, name: str, stride: str) -> str:
        """Storage for one variable of many threads: elements apart, or one value behind the other."""
        declaration = self.storage.declarations[name]
        kind, suffix = _plain_type(declaration), " ".join(declaration.suffix)
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
                self._open(head)
                for inner in body:
                    self._item(inner)
                if otherwise:
                    self._reopen_else()
                    for inner in otherwise:
                        self._item(inner)
                self._close()
            case Region(pieces):
                self.region += 1
                self._region(pieces)

    def _group_code(self, statement: Statement) -> None:
        if isinstance(statement, Declaration) and "threadgroup" in statement.type and "*" not in statement.type:
            kind = " ".join(token for token in statement.type if token != "threadgroup")
            variable = ThreadgroupVariable(statement.name, kind, " ".join(statement.suffix))
            text, self.threadgroup_end = place_variables([variable], self.threadgroup_end)
            self._line(text)
        else:
            self._statement(statement)

    # --- rows ---

    def _region(self, pieces: Sequence[Piece]) -> None:
        self._line("for (uint msl_s = 0; msl_s < msl_rows; ++msl_s) [&]() MSL_LAMBDA {")
        self.depth += 1
        self._line("const uint msl_base = msl_s * msl_lanes; (void)msl_base;")
        if self.uses_live_rows:
            self._line("if (!msl_live_rows[msl_s]) return;")
        if self.uses_live:
            self._line("bool* const msl_live_here = msl_live + msl_base;")
            self.masks.append("msl_live_here")
        for parameter in self.kernel.parameters:
            if self.variables.levels.get(parameter.name) == ROW:
                self._line(f"const {parameter.type} {parameter.name} = ({parameter.type})msl_s;")
        for name, home in self.storage.homes.items():
            if self.region not in self.storage.users[name]:
                continue
            if home is Home.ROW:
                self._line(self._array(name, self.nest.lanes))
            elif home is Home.GROUP and not self._is_lane(name):
                self._line(f"msl_type_{name}& {name} = msl_all_{name}[msl_s];")
        for piece in pieces:
            self._piece(piece)
        if self.uses_live:
            self.masks.pop()
        self.depth -= 1
        self._line("}();")

    def _piece(self, piece: Piece) -> None:
        match piece:
            case Lanes(statements):
                self._lanes(statements)
            case RowCode(statement):
                self._row_code(statement)
            case RowReturn():
                self._line("msl_live_rows[msl_s] = false;")
                self._line("return;")
            case RowBlock(head, body, otherwise):
                self._open(head)
                self._pieces(body)
                if otherwise:
                    self._reopen_else()
                    self._pieces(otherwise)
                self._close()
            case Masked():
                self._masked(piece)
            case Strided():
                self._strided(piece)
            case CollectivePiece():
                self._collective(piece)

    def _pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._piece(piece)

    def _row_code(self, statement: Declaration | Simple) -> None:
        stored = isinstance(statement, Declaration) and self.storage.home(statement.name) is Home.GROUP
        self._statement(statement, stored=stored)

    def _masked(self, piece: Masked) -> None:
        self._line(f"bool {piece.mask}[{self.nest.lanes}] = {{}};")
        self._lane_loop(piece.condition, [f"{piece.mask}[msl_l] = ({' '.join(piece.condition)});"], vectorize=True)
        self._under_mask(piece.mask, piece.body)
        if piece.otherwise:
            inverse = f"{piece.mask}_else"
            self._line(f"bool {inverse}[{self.nest.lanes}] = {{}};")
            self._lane_loop([], [f"{inverse}[msl_l] = !{piece.mask}[msl_l];"], vectorize=True)
            self._under_mask(inverse, piece.otherwise)

    def _under_mask(self, mask: str, pieces: Sequence[Piece]) -> None:
        self._line(f"if (msl::any_lane({mask}, msl_lanes)) {{")
        self.depth += 1
        self.masks.append(mask)
        self._pieces(pieces)
        self.masks.pop()
        self._close()

    def _strided(self, piece: Strided) -> None:
        """The row's lanes step together; the last steps may be too far for some of them."""
        name, kind = piece.variable.name, _plain_type(piece.variable)
        bound, step = " ".join(piece.bound), " ".join(piece.step)
        self._line(f"for ({kind} msl_offset_{name} = 0;; msl_offset_{name} += ({step})) {{")
        self.depth += 1
        self.strided[name] = piece
        self._line(f"uint msl_count_{name} = 0;")
        counted = [f"msl_count_{name} += {name} < ({bound});"]
        self._lane_loop([name, *piece.bound], counted, vectorize=True, masked=False)
        self._line(f"if (msl_count_{name} == 0) break;")
        self._line(f"const bool msl_full_{name} = msl_count_{name} == msl_lanes;")
        self.masks.append(f"?msl_full_{name} || {name} < ({bound})")
        self._pieces(piece.body)
        self.masks.pop()
        del self.strided[name]
        self._close()

    def _collective(self, piece: CollectivePiece) -> None:
        argument, values = f"msl_argument_of_{piece.name}", f"msl_values_of_{piece.name}"
        operands, kind = f"msl_operands_of_{piece.name}", f"msl_type_of_{piece.name}"
        self._line(f"auto {argument} = [&](uint msl_l) MSL_LAMBDA {{")
        self.depth += 1
        self._lane_names([*piece.argument, *piece.operand])
        self._line(f"return ({' '.join(piece.argument)});")
        self.depth -= 1
        self._line("};")
        self._line(f"typedef decltype({argument}(0u)) {kind};")
        self._line(f"alignas(64) {kind} {values}[msl::simd_width]; uint {operands}[msl::simd_width]; (void){operands};")
        work = [f"{values}[msl_l] = {argument}(msl_l);"]
        if piece.operand:
            work.append(f"{operands}[msl_l] = (ushort)({' '.join(piece.operand)});")
        names = [name for name in piece.operand if piece.operand]
        masks = [mask for mask in self.masks if mask.startswith("?")]
        self._lane_loop([*names, *(token for mask in masks for token in mask.split())], work, vectorize=True)
        active = f"msl::active_lanes({', '.join(self.masks)})" if self.masks else "~0u"
        if masks:
            raise UnknownForm("a collective in a loop that lanes leave at different times")
        self._line(f"msl::{piece.collective.operation}::apply({values}, {operands}, {active});")
        if piece.collective.level == ROW:
            self._line(f"const {kind} {piece.name} = {values}[0];")

    # --- lanes ---

    def _lanes(self, statements: Sequence[Statement]) -> None:
        tokens = [token for statement in statements for token in [*tokens_of(statement), ";"]]
        saved, self.lines = self.lines, []
        self.depth += 1
        for statement in statements:
            stored = isinstance(statement, Declaration) and self.storage.home(statement.name) in {Home.ROW, Home.GROUP}
            repeated = isinstance(statement, Declaration) and self.storage.home(statement.name) is Home.AGAIN
            if not repeated:
                self._statement(statement, stored=stored)
        self.depth -= 1
        work, self.lines = self.lines, saved
        if not work:
            return
        if "return" in tokens:
            work = ["[&]() MSL_LAMBDA {", *work, "}();"]
        self._lane_loop(tokens, work, vectorize=self._may_vectorize(statements, tokens))

    def _may_vectorize(self, statements: Sequence[Statement], tokens: Sequence[str]) -> bool:
        """An array that stays in memory is shared by all steps of the loop, so clang must look for itself."""
        if any("atomic" in token or token in self.dependent for token in tokens):
            return False
        constants = {*self.integers, *(n for s in statements for n in unrolled_variables(s, self.integers))}
        return all(
            subscripts_are_constant(leaf.name, tokens, constants | names_in(leaf.suffix))
            for statement in statements
            for leaf in leaves(statement)
            if isinstance(leaf, Declaration) and leaf.suffix and self.storage.home(leaf.name) is Home.LOCAL
        )

    def _lane_loop(self, tokens: Sequence[str], work: Sequence[str], *, vectorize: bool, masked: bool = True) -> None:
        masks = self.masks if masked else []
        used = [*tokens, *(token for mask in masks if mask.startswith("?") for token in mask.split())]
        pragma = "MSL_VECTORIZE " if vectorize else ""
        self._line(f"{pragma}for (uint msl_l = 0; msl_l < msl_lanes; ++msl_l) {{")
        self.depth += 1
        for mask in masks:
            if not mask.startswith("?"):
                self._line(f"if (!{mask}[msl_l]) continue;")
        self._lane_names(used)
        for mask in masks:
            if mask.startswith("?"):
                self._line(f"if (!({mask[1:]})) continue;")
        for line in work:
            self._line(line.strip())
        self._close()

    def _lane_names(self, tokens: Sequence[str]) -> None:
        """What a lane's code needs to see: its place, its stored variables, its repeated ones."""
        used = names_in(tokens)
        self._add_repeated(used)
        self._line("const uint msl_index = msl_base + msl_l; (void)msl_index;")
        self._line(f"{self.nest.place} (void)msl_x; (void)msl_y; (void)msl_z;")
        for parameter in self.kernel.parameters:
            if self.variables.levels.get(parameter.name) == LANE and parameter.name in used:
                value = builtin_value(parameter)
                if parameter.role == "thread_index_in_simdgroup":
                    value = f"({parameter.type})msl_l"
                self._line(f"const {parameter.type} {parameter.name} = {value};")
        after_loops = self._depending_on_strided(used)
        self._declared_names(used - after_loops)
        for name, piece in self.strided.items():
            if name in used:
                kind = _plain_type(piece.variable)
                self._line(f"const {kind} {name} = ({kind})({' '.join(piece.start)}) + msl_offset_{name};")
        self._declared_names(after_loops)
        for name in sorted(used):
            if name.startswith("msl_result_") and self.variables.levels[name] == LANE:
                self._line(f"const msl_type_of_{name}& {name} = msl_values_of_{name}[msl_l];")

    def _declared_names(self, used: set[str]) -> None:
        for name, declaration in self.storage.declarations.items():
            home = self.storage.home(name)
            if name not in used or not self._is_lane(name):
                continue
            if home is Home.AGAIN:
                self._line(f"const {_declaration_text(declaration)};")
            elif home is not Home.LOCAL:
                self._line(self._reference(name, home))

    def _depending_on_strided(self, used: set[str]) -> set[str]:
        """The repeated variables of `used` that read the variable of a strided loop, directly or not."""
        found: set[str] = set()
        while True:
            more = {
                name
                for name in used - found
                if self.storage.home(name) is Home.AGAIN
                and names_in(self.storage.declarations[name].initializer or []) & (found | self.strided.keys())
            }
            if not more:
                return found
            found |= more

    def _add_repeated(self, used: set[str]) -> None:
        pending = set(used)
        while pending:
            name = pending.pop()
            more: set[str] = set()
            if self.storage.home(name) is Home.AGAIN:
                more = names_in(self.storage.declarations[name].initializer or [])
            elif name in self.strided:
                more = names_in(self.strided[name].start)
            pending |= more - used
            used |= more

    def _reference(self, name: str, home: Home) -> str:
        place = "msl_l" if home is Home.ROW else "msl_index"
        if name in self.storage.spread:
            stride = self.nest.lanes if home is Home.ROW else "msl::storage_stride"
            return f"const msl::Spread<msl_type_{name}, {stride}> {name}{{msl_all_{name} + {place}}};"
        return f"msl_type_{name}& {name} = msl_all_{name}[{place}];"

    def _is_lane(self, name: str) -> bool:
        return self.variables.levels.get(name) == LANE

    # --- statements as text ---

    def _statement(self, statement: Statement, *, stored: bool = False) -> None:
        match statement:
            case Simple(tokens):
                self._line(self._simple(tokens) + ";")
            case Declaration():
                self._line((_assignment_text(statement) if stored else _declaration_text(statement)) + ";")
            case Block(body):
                self._open(statement)
                for inner in body:
                    self._statement(inner)
                self._close()
            case If(_, then, otherwise):
                self._open(statement)
                for inner in then:
                    self._statement(inner)
                if otherwise:
                    self._reopen_else()
                    for inner in otherwise:
                        self._statement(inner)
                self._close()
            case For(_, _, _, body) | While(_, body):
                self._open(statement)
                for inner in body:
                    self._statement(inner)
                self._close()

    def _simple(self, tokens: Sequence[str]) -> str:
        if list(tokens) == ["return"] and self.masks[:1] == ["msl_live_here"]:
            return "{ msl_live_here[msl_l] = false; return; }"
        return " ".join(tokens)

    def _open(self, head: Block | If | For | While) -> None:
        match head:
            case Block():
                text = "{"
            case If(condition):
                text = f"if ({' '.join(condition)}) {{"
            case While(condition):
                text = f"while ({' '.join(condition)}) {{"
            case For(init, condition, step):
                short = own_trips(head, self.integers) <= UNROLLED_TRIPS
                pragma = _MATRIX_LOOP if self.variables.has_matrix(tokens_of(head)) else _SHORT_LOOP if short else ""
                start = "" if init is None else _statement_text(init)
                text = f"{pragma}for ({start}; {' '.join(condition)}; {' '.join(step)}) {{"
        self._line(text)
        self.depth += 1

    def _reopen_else(self) -> None:
        self.depth -= 1
        self._line("} else {")
        self.depth += 1

    def _close(self) -> None:
        self.depth -= 1
        self._line("}")

    def _line(self, text: str) -> None:
        self.lines.append(_INDENT * self.depth + text)


def _all_regions(items: Sequence[Item]) -> list[Region]:
    found = []
    for item in items:
        if isinstance(item, Region):
            found.append(item)
        elif isinstance(item, GroupBlock):
            found += _all_regions([*item.body, *item.otherwise])
    return found


def _returns_in_lanes(piece: Piece) -> bool:
    match piece:
        case Lanes(statements):
            return any("return" in tokens_of(statement) for statement in statements)
        case RowBlock() | Masked():
            return any(_returns_in_lanes(inner) for inner in [*piece.body, *piece.otherwise])
        case _:
            return False


def _has_row_return(piece: Piece) -> bool:
    match piece:
        case RowReturn():
            return True
        case RowBlock() | Masked():
            return any(_has_row_return(inner) for inner in [*piece.body, *piece.otherwise])
        case _:
            return False


def _plain_type(declaration: Declaration) -> str:
    """The type of a variable that is declared in one place and assigned in another."""
    kept = list(declaration.type)
    if "*" not in kept:
        kept = [token for token in kept if token not in {"const", "constexpr"}]
    elif kept[-1] == "const":
        kept.pop()
    return " ".join(kept)


def _declaration_text(declaration: Declaration) -> str:
    text = " ".join([*declaration.type, declaration.name, *declaration.suffix])
    if declaration.initializer is None:
        return text
    joined = " ".join(declaration.initializer)
    return f"{text} {joined}" if declaration.initializer[0] == "(" and declaration.is_list else f"{text} = {joined}"


def _assignment_text(declaration: Declaration) -> str:
    """The initialisation of a variable that is stored elsewhere."""
    if declaration.initializer is None:
        return ""
    joined = " ".join(declaration.initializer)
    if not declaration.is_list:
        return f"{declaration.name} = {joined}"
    if declaration.suffix:
        start = f"msl_start_{declaration.name}"
        if declaration.name:
            return f"{{ const msl_type_{declaration.name} {start} = {joined}; {declaration.name} = {start}; }}"
    return f"{declaration.name} = msl_type_{declaration.name} {joined}"


def _statement_text(statement: Statement) -> str:
    match statement:
        case Simple(tokens):
            return " ".join(tokens)
        case Declaration():
            return _declaration_text(statement)
        case _:
            raise UnknownForm("a loop that begins with neither a declaration nor an expression")
