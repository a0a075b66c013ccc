"""CommonMark, as the repository's pages are written, for Python-Markdown, which MkDocs reads.

Python-Markdown wants an empty line before a list or a table, four spaces for each level of a list, and to be told where
HTML holds Markdown.
"""

from __future__ import annotations

import re

FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^( *)([-*+]|\d+[.)])( +)")
NUMBER = re.compile(r"^(\d+)([.)] )")
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
    lists: list[tuple[int, int]] = []  # of each open item, the columns of its mark and of its text
    code = words = False  # the line before belongs to a block of code, or to a paragraph or a table
    loose = False  # the innermost item has more than one block
    for line in text.splitlines():
        item, fence = ITEM.match(line), FENCE.match(line)
        if code or not line.strip():
            out.append(moved(line, lists))
            if code and fence:
                out.append("")
            code, words, loose = code and not fence, False, True
            continue
        indent = len(line) - len(line.lstrip())
        beside = any(indent == mark for mark, _ in lists)
        if item and words and not beside and item[2] not in ("-", "*", "+", "1."):
            item = None  # a number that begins a line within a paragraph
        if item or fence or not words:
            while lists and indent < lists[-1][1]:
                lists.pop()
        goes_on = words and not item and not fence
        table = line.lstrip().startswith("|")
        if words and (
            (item and (loose or not (beside or lists))) or fence or (table and not out[-1].lstrip().startswith("|"))
        ):
            out.append("")
        if item:
            out.append("    " * len(lists) + literal(line.lstrip()))
            lists.append((indent, len(item[0])))
            loose = False
        elif goes_on and lists and not table:
            out.append(NUMBER.sub(r"\1\\\2", literal(line.lstrip())))
        else:
            out.append(moved(line if fence else literal(line), lists))
        code, words = bool(fence), not fence and not line.startswith("#")
    return HOLDS_MARKDOWN.sub(r'<\1 markdown="1">', "\n".join(out)) + "\n"


def literal(line: str) -> str:
    """A line of prose in which two brackets side by side, such as those of an index, make no reference."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("][", r"]\[") for part in parts)


def moved(line: str, lists: list[tuple[int, int]]) -> str:
    """A line inside of list items, four spaces for each of them."""
    return "    " * len(lists) + line[lists[-1][1] :] if lists and line.strip() else line
