"""Loops over the lanes of a row: what a lane sees, which lanes take part, what clang may be promised."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from software_gpu.entry_points import builtin_value
from software_gpu.msl_parser import Kernel
from software_gpu.region_pieces import Strided
from software_gpu.region_storage import RESULT, Home, Storage, subscripts_are_constant, unrolled_variables
from software_gpu.region_text import CodeText, declaration_text, plain_type
from software_gpu.statements import Declaration, Statement, leaves, names_in, tokens_of
from software_gpu.variables import LANE

__all__ = ["SIMDGROUP_ROWS", "X_ROWS", "LaneCode", "Nest"]


@dataclass(frozen=True)
class Nest:
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


SIMDGROUP_ROWS = Nest(
    head="constexpr uint msl_lanes = msl::simd_width; const uint msl_rows = msl_nx / msl_lanes;",
    place="const uint msl_x = msl_index, msl_y = 0, msl_z = 0;",
    lanes="msl::simd_width",
    rows="msl::simd_width",
)
X_ROWS = Nest(
    head="const uint msl_lanes = msl_nx, msl_rows = msl_ny * msl_nz;",
    place="const uint msl_x = msl_l, msl_y = msl_s % msl_ny, msl_z = msl_s / msl_ny;",
    lanes="msl::storage_stride",
    rows="msl::max_threads",
)


@dataclass
class LaneCode(CodeText):
    """The part of a kernel's region form that lanes run.

    Attributes:
        dependent: Functions that keep the steps of a loop over lanes from being independent.
        strided: Loops around what is being written that the row's lanes step through together, by their variable.
    """

    kernel: Kernel
    storage: Storage
    nest: Nest
    dependent: set[str]
    strided: dict[str, Strided] = field(default_factory=dict, kw_only=True)

    def lanes_code(self, statements: Sequence[Statement]) -> None:
        tokens = [token for statement in statements for token in [*tokens_of(statement), ";"]]
        homes = {each.name: self.storage.home(each.name) for each in statements if isinstance(each, Declaration)}
        own = {name for name, home in homes.items() if home is Home.AGAIN}
        if len(own) == len(statements):
            return
        saved, self.lines = self.lines, []
        self.depth += 1
        for statement in statements:
            if isinstance(statement, Declaration) and statement.name in own:
                self.line(f"const {declaration_text(statement)};")  # not ahead of what it reads, which may be set here
            else:
                stored = isinstance(statement, Declaration) and homes[statement.name] in {Home.ROW, Home.GROUP}
                self.statement(statement, stored=stored)
        self.depth -= 1
        work, self.lines = self.lines, saved
        if "return" in tokens:
            work = ["[&]() MSL_LAMBDA {", *work, "}();"]
        self.lane_loop(tokens, work, vectorize=self._may_vectorize(statements, tokens), own=own)

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

    def lane_loop(
        self,
        tokens: Sequence[str],
        work: Sequence[str],
        *,
        vectorize: bool,
        masked: bool = True,
        own: Collection[str] = (),
    ) -> None:
        masks = self.masks if masked else []
        pragma = "MSL_VECTORIZE " if vectorize else ""
        self.line(f"{pragma}for (uint msl_l = 0; msl_l < msl_lanes; ++msl_l) {{")
        self.depth += 1
        for mask in masks:
            if not mask.startswith("?"):
                self.line(f"if (!{mask}[msl_l]) continue;")
        self._lane_place()
        seen = set(own)
        for mask in masks:  # a lane that takes no part computes nothing more: it might read or divide what it may not
            if mask.startswith("?"):
                seen |= self._lane_names(mask.split(), seen)
                self.line(f"if (!({mask[1:]})) continue;")
        self._lane_names(tokens, seen)
        for line in work:
            self.line(line.strip())
        self.close()

    def lane_names(self, tokens: Sequence[str]) -> None:
        """What a lane's code needs to see: its place, its stored variables, its repeated ones."""
        self._lane_place()
        self._lane_names(tokens, set())

    def _lane_place(self) -> None:
        self.line("const uint msl_index = msl_base + msl_l; (void)msl_index;")
        self.line(f"{self.nest.place} (void)msl_x; (void)msl_y; (void)msl_z;")

    def _lane_names(self, tokens: Sequence[str], seen: set[str]) -> set[str]:
        """Declares what tokens need, but for what has been `seen`; gives the names."""
        used = names_in(tokens)
        self._add_repeated(used)
        used -= seen
        for parameter in self.kernel.parameters:
            if self.variables.levels.get(parameter.name) == LANE and parameter.name in used:
                value = builtin_value(parameter)
                if parameter.role == "thread_index_in_simdgroup":
                    value = f"({parameter.type})msl_l"
                self.line(f"const {parameter.type} {parameter.name} = {value};")
        for name in sorted(used):
            if name.startswith(RESULT) and self.variables.levels[name] == LANE:
                self.line(f"const msl_type_of_{name}& {name} = msl_values_of_{name}[msl_l];")
        after_loops = self._depending_on_strided(used)
        self._declared_names(used - after_loops)
        for name, piece in self.strided.items():
            if name in used:
                kind = plain_type(piece.variable)
                self.line(f"const {kind} {name} = ({kind})({' '.join(piece.start)}) + msl_offset_{name};")
        self._declared_names(after_loops)
        return used

    def _declared_names(self, used: set[str]) -> None:
        for name, declaration in self.storage.declarations.items():
            home = self.storage.home(name)
            if name not in used or not self.is_lane(name):
                continue
            if home is Home.AGAIN:
                self.line(f"const {declaration_text(declaration)};")
            elif home is not Home.LOCAL:
                self.line(self._reference(name, home))

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

    def is_lane(self, name: str) -> bool:
        return self.variables.levels.get(name) == LANE
