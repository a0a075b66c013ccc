"""Pages of the C++ reference: each declaration of a public header as it stands there, with its comment as text."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(
    r"(?:struct|class|enum class|using)\s+(\w+)|inline constexpr \w+ (\w+)|^[^(=]*?(\w+)\(|\b(\w+);$", re.MULTILINE
)
PRIVATE = re.compile(r"^ private:\n.*?(?=^\};)", re.MULTILINE | re.DOTALL)
NAMESPACE = re.compile(r"^(inline )?namespace [\w:]+ \{$|^\}  // namespace|^extern \"C\" \{$|^\}$")


def pieces(lines: list[str]) -> list[list[str]]:
    """Declarations with the comments above them: apart by an empty line, or by a comment that follows code."""
    found: list[list[str]] = [[]]
    depth = 0
    comment = False  # inside /* */
    for line in lines:
        if NAMESPACE.match(line) and depth == 0:
            found += [[line], []]
            continue
        starts = line.startswith(("///", "/*"))
        code_before = bool(found[-1]) and not is_comment(found[-1][-1])
        if depth == 0 and not comment and (not line.strip() or (starts and code_before)):
            found.append([])
        if line.strip():
            found[-1].append(line)
        prose = comment or starts
        comment = (comment or line.startswith("/*")) and "*/" not in line
        if not prose:
            code = line.partition("//")[0]
            depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
        elif depth > 0 and not line.strip():
            found[-1].append(line)
    return [piece for piece in found if piece]


def is_comment(line: str) -> bool:
    """Whether a line belongs to a comment that stands alone."""
    return line.startswith(("//", "/*", " *"))


def comment_text(lines: list[str]) -> str:
    """The words of a comment as Markdown; what is no code is taken as it is written."""
    words = "\n".join(re.sub(r"^(///|//|/\*| \*(?!/))? ?|\s*\*/$", "", line) for line in lines)
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(part if part.startswith("`") else _literal(part) for part in parts)


def _literal(words: str) -> str:
    """Words that Markdown shows as they are. It knows no escape for `<`."""
    return re.sub(r"([*_>\[\]|])", r"\\\1", words).replace("<", "&lt;")


def names_of(code: str) -> list[str]:
    """What a piece of code declares, in its own order."""
    found: list[str] = []
    inside = 0
    for line in code.splitlines():
        outer = inside == 0 and not line.startswith((" ", "}", "template", "requires", "extern"))
        if outer and (match := NAME.search(line)):
            found.append(next(name for name in match.groups() if name))
        inside += line.count("{") - line.count("}")
    return list(dict.fromkeys(found))


def page(header: Path) -> str:
    """The page of a header."""
    lines = [line for line in header.read_text().splitlines() if not line.startswith(("#", "}  // extern"))]
    first = next(n for n, line in enumerate(lines) if not is_comment(line))
    text = f"# fretwork/{header.name}\n\n{comment_text(lines[:first])}\n"
    space = ""
    for piece in pieces(lines[first:]):
        if NAMESPACE.match(piece[0]):
            opened = re.match(r"namespace ([\w:]+) \{", piece[0])
            space = opened[1] if opened else "fretwork"
            continue
        code = [line for line in piece if not is_comment(line)]
        words = comment_text([line for line in piece if is_comment(line)])
        if code:
            shown = PRIVATE.sub("", "\n".join(code) + "\n")
            names = names_of(shown) or names_of("\n".join(code[1:]))
            if not names:  # such as an explicit instantiation
                continue
            title = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            inner = space.removeprefix("fretwork").removeprefix("::")
            text += f"\n### {inner + '::' if inner else ''}{title}\n\n```cpp\n{shown}```\n"
        text += f"\n{words}\n" if words else ""
    return text
