"""CommonMark, as the repository's pages are written, for Python-Markdown, which MkDocs reads.

Python-Markdown wants an empty line before a list or a table, four spaces for each level of a list, and to be told where
HTML holds Markdown.
"""

from __future__ import annotations

import re

FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
HOLDS_MARKDOWN = re.compile(r"<(table|tr|td|th|details)>")


def prose(text: str) -> str:
    """The text without its blocks of code and without code within lines."""
    kept, inside = [], False
    for line in text.splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return re.sub(r"`[^`\n]*`", "`", "\n".join(kept))


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures that are files."""
    return [target for target in LINK.findall(prose(text)) if "://" not in target]


def to_python_markdown(text: str) -> str:
    """The same page in Python-Markdown's terms."""
    out: list[str] = []
    levels: list[int] = []  # columns at which the texts of the open list items begin
    inside = False  # a block of code
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if inside or not line.strip():
            inside = inside and not FENCE.match(line)
            out.append(moved(line, levels))
            continue
        while levels and indent < levels[-1]:
            # A paragraph goes on behind its first line, wherever that stands; anything else ends the item.
            levels.pop()
        item = ITEM.match(line)
        table = line.lstrip().startswith("|")
        before = out[-1].strip() if out else ""
        if before and ((item and not listed(before)) or (table and not before.startswith("|"))):
            out.append("")
        inside = bool(FENCE.match(line))
        if not inside:
            line = literal(line)
        if item:
            out.append("    " * len(levels) + line.lstrip())
            levels.append(len(item[0]))
            continue
        if inside and before and levels:
            out.append("")
        out.append(moved(line, levels))
    return HOLDS_MARKDOWN.sub(r'<\1 markdown="1">', "\n".join(out)) + "\n"


def literal(line: str) -> str:
    """A line of prose in which two brackets side by side, such as those of an index, make no reference."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("][", r"]\[") for part in parts)


def listed(line: str) -> bool:
    """Whether a list item may follow a line directly: one of a list."""
    return line.startswith(" ") or bool(ITEM.match(line))


def moved(line: str, levels: list[int]) -> str:
    """A line inside of list items, four spaces for each of them."""
    return "    " * len(levels) + line[levels[-1] :] if levels and line.strip() else line
