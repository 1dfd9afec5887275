"""The language that kernels are written in: which forms the tokens of a source may make.

What is refused is what C++ has and kernels have no use for, and with which one could leave its buffers in a way that no
index shows, or run before it is launched: declarations of what is defined elsewhere, attributes, pointers made of
integers, pointers to functions, pointers inside of structs or behind another name, lambdas, variables that are not
constants. What tokens alone can't tell is asked of clang: `pointer_edits` writes the questions into the text, and
`include/msl_pointers.h` answers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from software_gpu.msl_parser import BUILTINS, Token, is_name, matching
from software_gpu.source_text import refuse

__all__ = ["check_language", "declaration_end", "pointer_edits"]

MAX_DEPTH = 64  # brackets within brackets

_ATTRIBUTES = BUILTINS | {"buffer", "threadgroup"}
_HEADS = frozenset({"if", "for", "while", "switch"})
_OTHER_DECLARATIONS = frozenset({"typedef", "using", "static_assert", "kernel", ";"})  # kernels: see msl_parser
_PAIRS = {")": "(", "]": "[", "}": "{"}
_SPACES = r"(?:(?:const|volatile|constant|device|thread|threadgroup) )*"
# Forms that have no place in a kernel, in the tokens joined by spaces; what they are, and what to write.
_FORMS = (
    (rf" (?:\*|&&?) {_SPACES}[,>] ", "a pointer or reference without a name", "types that are passed on are values"),
    (rf" &&? {_SPACES}\) | \* {_SPACES[:-1]}+\) ", "a cast to a reference", "cast to a pointer, `(device T*)p`"),
    (r" (?!return )[A-Za-z_]\w* \( [^()*]*\* \) ", "a pointer without a name", "cast as `(device T*)p`"),
    (r" :: \* ", "a pointer to a member", "name the member"),
    (r" \. \. \. ", "'...'", "write the arguments out"),
    (r" (?:return|case|else|do|[^\w\s\])[]+) \[ (?!\[ )", "a lambda", "write a function"),
    (r" (?:return|,) \{ \} | return \{ | \* \w+ (?:= )?\{ ", "a value in empty braces", "write the value"),
    (r" \( \{ ", "a statement inside an expression", "write a function"),
    (r" namespace (?!metal ; )| (?!using )\S+ namespace ", "a namespace", "write `using namespace metal;`"),
    (r" (?:struct|enum) (?![A-Za-z_]\w* )| struct \w+ : ", "a struct with no name, or a base", "name plain data"),
    (r" [;{}] (?!default )[A-Za-z_]\w* : ", "a label", "MSL has no goto"),
    (r" template < [^()]* template | > (?:struct|using) ", "a template of types", "templates are functions"),
)
_REFUSED = tuple((re.compile(pattern), what, why) for pattern, what, why in _FORMS)  # together they are slower
_ATTRIBUTE = re.compile(r" (?=\[ \[ )(?:\[ \[ (\w+) (?:\( \d+ \) )?\] \] )?")
_ALIAS = re.compile(r" (?:typedef|using \w+ =)(?= )([^;]*)(?= ; )")
_STRUCT = re.compile(r" struct \w+ \{ ([^}]*)\}(?= )")
_NOT_DATA = re.compile(r" (?:[*&(=~{]|&&|struct|enum|static) ")
# In a function: `type name()`, `type name(int` and their like, which declare a function and no variable.
_PROTOTYPE = re.compile(
    r" (?!return |else |do )[A-Za-z_]\w*(?: [*&])* (\w+) \( (?:\) ;|void |"
    r"(?:const |device |constant |thread |threadgroup |unsigned|signed|size_t|"
    r"bool|b?float|half|u?(?:char|short|int|long))"
    r"[\d ]*(?![({]))"
)
_SUBSCRIPT = re.compile(r"\[ [^\[\]]*\] ")
_INDIRECT = re.compile(rf" (?=\( {_SPACES}[*&] )")
_CAST = re.compile(r" \* (?=\) )")
_IN_CAST = re.compile(r"[A-Za-z_]\w*|::|[<>,*]|\d+")
_IN_TYPE = re.compile(r"[A-Za-z_]\w*|::|[<>,*&]|\d+")


def check_language(tokens: Sequence[Token]) -> None:
    """Refuses a source, its macros expanded, that holds a form which kernels have no use for.

    Raises:
        KernelCompileError: With the line, the form, and what may be written instead.
    """
    _check_brackets(tokens)
    text = _joined(tokens)
    for pattern, what, why in _REFUSED:
        found = pattern.search(text)
        if found:
            refuse(_line(tokens, text, found.start()), what, why)
    for place, what, why in (*_attribute_problems(tokens, text), *_type_problems(text), *_call_problems(tokens, text)):
        refuse(_line(tokens, text, place), what, why)
    _check_declarations(tokens)


def pointer_edits(tokens: Sequence[Token]) -> Iterator[tuple[int, str]]:
    """What is written into the text, and where, for clang to see that every pointer comes from a pointer.

    A cast goes through a type that is made of pointers only, and no template is given a pointer as a type.
    """
    text = _joined(tokens)
    for found in _CAST.finditer(text):
        yield tokens[_index(text, found.end())].end, "(::msl::Pointer)"
    for start, end in _declarations(tokens):
        if tokens[start].text == "template":
            body = next((i for i in range(start, end) if tokens[i].text == "{"), start)
            types = [after.text for token, after in pairwise(tokens[start:body]) if token.text == "typename"]
            if types:
                checks = " ".join(f"static_assert(::msl::is_plain<{name}>);" for name in types if is_name(name))
                yield tokens[body].end, f" {checks}"


def declaration_end(tokens: Sequence[Token], start: int) -> int:
    """Index of the semicolon or closing brace that ends the declaration at namespace scope."""
    depth = 0
    for index in range(start, len(tokens)):
        text = tokens[index].text
        depth += (text in "({[") - (text in ")}]")
        if depth == 0 and text == ";":
            return index
        if depth == 0 and text == "}" and tokens[index + 1 : index + 2] and tokens[index + 1].text != ";":
            return index
    return len(tokens)


def _joined(tokens: Sequence[Token]) -> str:
    """The tokens between single spaces, the words of a static_assert left out: they have spaces of their own."""
    return " ".join(["", *(token.text if token.text[0] != '"' else '""' for token in tokens), ""])


def _index(text: str, position: int) -> int:
    """The token that begins at or after a place in the joined text, or after the space there."""
    return text.count(" ", 0, position + (text[position] == " ")) - 1


def _line(tokens: Sequence[Token], text: str, position: int) -> int:
    return tokens[min(_index(text, position), len(tokens) - 1)].line


def _check_brackets(tokens: Sequence[Token]) -> None:
    opened: list[Token] = []
    for token in tokens:
        if token.text in _PAIRS:
            if not opened or opened.pop().text != _PAIRS[token.text]:
                refuse(token.line, f"'{token.text}'", "nothing is open that it would close")
        elif token.text in "([{":
            opened.append(token)
            if len(opened) > MAX_DEPTH:
                refuse(token.line, f"'{token.text}'", f"brackets stand in at most {MAX_DEPTH} others")
    if opened:
        refuse(opened[-1].line, f"'{opened[-1].text}'", "it is never closed")


_Problem = tuple[int, str, str]


def _attribute_problems(tokens: Sequence[Token], text: str) -> Iterator[_Problem]:
    for found in _ATTRIBUTE.finditer(text):
        first = _index(text, found.start())
        apart = tokens[first].end != tokens[first + 1].start
        if found[1] not in _ATTRIBUTES or apart:
            name = f"the attribute [[{found[1]}]]" if found[1] else "an attribute"
            yield (
                found.start(),
                name,
                (
                    "it is not offered; [[buffer(n)]], [[threadgroup(n)]] and the positions of threads are. Where a "
                    "constant decides, write one kernel for each case and choose with a preprocessor macro"
                ),
            )


def _type_problems(text: str) -> Iterator[_Problem]:
    for found in _ALIAS.finditer(text):
        if re.search(r" (?:[*&(]|&&) ", _SUBSCRIPT.sub("", f"{found[1]} ")):
            yield found.start(), "another name of a pointer", "write the pointer's type where it is used"
    for found in _STRUCT.finditer(text):
        if _NOT_DATA.search(_SUBSCRIPT.sub("", f" {found[1]}")):
            yield found.start(), "a struct that holds more than values", "write numbers, vectors and arrays of them"


def _call_problems(tokens: Sequence[Token], text: str) -> Iterator[_Problem]:
    for found in _CAST.finditer(text):
        closing = _index(text, found.end())
        opening = closing - 1
        while opening and _IN_CAST.fullmatch(tokens[opening].text):
            opening -= 1
        if tokens[opening].text != "(" or closing - opening < 3:
            yield found.start(), "a pointer without a name", "cast as `(device T*)p`, and name parameters"
    for found in _INDIRECT.finditer(text):
        first = _index(text, found.start())
        last = matching(tokens, first)
        while tokens[first - 1].text == "(" and tokens[last + 1].text == ")":
            first, last = first - 1, last + 1
        called = last + 1 < len(tokens) and tokens[last + 1].text == "("
        if called and tokens[first - 1].text not in _HEADS:
            yield found.start(), "a pointer or reference to a function", "call functions by their names"


def _declarations(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """First token and end, past the semicolon or brace, of each declaration outside functions."""
    start = 0
    while start < len(tokens):
        end = min(declaration_end(tokens, start) + 1, len(tokens))
        yield start, end
        start = end


def _check_declarations(tokens: Sequence[Token]) -> None:
    declarations = [tokens[start:end] for start, end in _declarations(tokens)]
    bodies = {_function_name(declaration) for declaration in declarations if _is_function(declaration)}
    for declaration in declarations:
        first, last = declaration[0], declaration[-1]
        if _is_function(declaration):
            _check_function(declaration, _function_name(declaration))
        elif last.text != ";":
            refuse(last.line, f"'{last.text}'", "the declaration that it ends is none")
        elif first.text in {"struct", "enum"}:
            if len(declaration) < 2 or declaration[-2].text != "}":
                refuse(first.line, f"'{first.text}'", "its members and a semicolon end its declaration")
        elif first.text not in _OTHER_DECLARATIONS and _function_name(declaration) not in bodies:
            _check_variable(declaration, _function_name(declaration))


def _is_function(declaration: Sequence[Token]) -> bool:
    """Whether a body in braces ends the declaration, of nothing that might also have braces at its end."""
    texts = [token.text for token in declaration]
    if "{" not in texts or texts[0] in {"struct", "enum", "typedef", "using"}:
        return False
    head = texts[: texts.index("{")]
    return "=" not in head or "(" in head[: head.index("=")] or texts[0] == "template"


def _function_name(declaration: Sequence[Token]) -> str:
    """The name before the first parenthesis that follows no equals sign; empty where there is none."""
    for before, token in pairwise(declaration):
        if token.text in ("=", "{") and declaration[0].text != "template":
            break
        if token.text == "(":
            return before.text
    return ""


def _check_function(declaration: Sequence[Token], name: str) -> None:
    line = declaration[0].line
    texts = [token.text for token in declaration]
    if not is_name(name):
        refuse(line, f"'{' '.join(texts[:4])} ...'", "it is neither a function nor a struct")
    opening = texts.index("(")
    closing = matching(declaration, opening)
    plain = all(_IN_TYPE.fullmatch(text) or text == "=" for text in texts[:opening])
    if not plain or texts[closing + 1] != "{":
        refuse(line, f"'{name}'", "between a function's type and its body stand its name and its parameters")
    parameters = _ATTRIBUTE.sub(" ", _joined(declaration[opening + 1 : closing]))
    if "(" in parameters:
        refuse(line, f"'{name}'", "a function's parameter is a value, a pointer or a reference to one")
    declared = _PROTOTYPE.search(_joined(declaration[closing + 1 :]))
    if declared:
        refuse(line, f"'{declared[1]}'", "a function is declared where its body is")
    if "static" in texts[closing:]:
        refuse(declaration[texts.index("static", closing)].line, "'static'", "a function's variables end with its call")


def _check_variable(declaration: Sequence[Token], name: str) -> None:
    texts = [token.text for token in declaration]
    if name:
        refuse(declaration[0].line, f"'{name}'", "a function is declared where its body is")
    if "constant" not in texts or "=" not in texts:
        end = texts.index("=") if "=" in texts else len(texts)
        variable = next((text for text in reversed(_outside_subscripts(texts[:end])) if is_name(text)), "?")
        refuse(
            declaration[0].line,
            f"'{variable}'",
            "a variable outside a function must be 'constant', its value behind '='",
        )


def _outside_subscripts(texts: Sequence[str]) -> list[str]:
    return _SUBSCRIPT.sub("", " ".join([*texts, ""])).split()
