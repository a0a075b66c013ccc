"""MkDocs hooks: the site is made of the repository's own pages, where they lie, and of a reference made of the sources.

The source path of a page is its path in the repository. So a link that works there works on the site, too, and one that
leads nowhere fails the build. A link to a source file leads to a page that shows it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import commonmark
import cpp_reference
import python_reference

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".cuh": "cpp", ".txt": "cmake"}


class Source(File):  # type: ignore[misc]
    """A page that is made of a source file."""

    def is_documentation_page(self) -> bool:
        return True


def address(path: str) -> str:
    """Where a page of the repository stands on the site."""
    stem, suffix = posixpath.splitext(path)
    stem = re.sub(r"(^|/)(README|index|__init__)$", "", stem)
    stem = stem.removeprefix("docs/").removeprefix("src/").replace("python/fretwork", "reference/python")
    stem = stem.replace("include/fretwork", "reference/cpp").lower()
    if suffix in LANGUAGES and stem.startswith(("examples", "ops", "bench")):
        stem += suffix.replace(".", "-")
    return posixpath.join(stem, "index.html")


def expand(entry: Any) -> list[Any]:
    """An entry of the navigation, whose globs become the files that they match."""
    if isinstance(entry, str):
        return [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob(entry))] if "*" in entry else [entry]
    ((title, below),) = entry.items()
    return [{title: below if isinstance(below, str) else expand_all(below)}]


def expand_all(entries: list[Any]) -> list[Any]:
    """A list of the navigation; what is named first is not repeated by a glob."""
    found: list[Any] = []
    for entry in entries:
        found += [one for one in expand(entry) if one not in found]
    return found


def paths_of(entries: list[Any]) -> list[str]:
    """The pages of a navigation."""
    found = []
    for entry in entries:
        below = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += [below] if isinstance(below, str) else paths_of(below)
    return found


def text_of(path: str) -> str:
    """The Markdown of a page."""
    file = ROOT / path
    if path.endswith(".md"):
        return commonmark.to_python_markdown(file.read_text())
    if path.startswith("python/fretwork/"):
        return python_reference.page(file)
    if path.startswith("include/"):
        return cpp_reference.page(file)
    files = [file] if file.is_file() else sorted(one for one in file.iterdir() if one.is_file())
    text = f"# {path}\n"
    for one in files:
        title = "" if one == file else f"\n## {one.name}\n"
        text += f"{title}\n```{LANGUAGES.get(one.suffix, 'text')}\n{one.read_text()}```\n"
    return text


def linked(path: str) -> list[str]:
    """The files of the repository that a page leads to."""
    folder = posixpath.dirname(path)
    found = [
        posixpath.normpath(posixpath.join(folder, target)) for target in commonmark.links((ROOT / path).read_text())
    ]
    return [one for one in found if (ROOT / one).exists()]


def named(entries: list[Any]) -> list[Any]:
    """A navigation in which pages of the reference have the names that differ: `jax.distributed`, `ops.h`."""
    found: list[Any] = []
    for entry in entries:
        if not isinstance(entry, str):
            ((title, below),) = entry.items()
            entry = {title: below if isinstance(below, str) else named(below)}
        elif entry.startswith("include/"):
            entry = {Path(entry).name: entry}
        elif entry.startswith("python/"):
            module = python_reference.module_name(ROOT / entry)
            entry = {module.removeprefix("fretwork."): entry}
        found.append(entry)
    return found


def on_config(config: Any) -> Any:
    """Fills in the navigation's globs, and names its pages."""
    config.nav = named(expand_all(config.nav))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Everything in the navigation, the pictures, and what the pages lead to."""
    pages = paths_of(config.nav)
    wanted = [*pages, *(str(p.relative_to(ROOT)) for p in sorted(Path(config.docs_dir).rglob("*.md")))]
    for path in [one for one in wanted if one.endswith(".md") and (ROOT / one).exists()]:
        wanted += linked(path)
    made = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in dict.fromkeys(wanted):
        if not (ROOT / path).exists():
            continue  # the navigation's own check says so
        is_text = path.endswith(".md") or path in pages or (ROOT / path).is_dir() or Path(path).suffix in LANGUAGES
        if is_text:
            page = Source(path, None, config.site_dir, True, dest_uri=address(path))
            page.inclusion = InclusionLevel.INCLUDED if path in pages else InclusionLevel.NOT_IN_NAV
            page._content = text_of(path)  # MkDocs has no other way to give a page both a text and an address
            made.append(page)
        else:
            made.append(File(path, str(ROOT), config.site_dir, True, dest_uri=path.removeprefix("docs/")))
    made += [
        File(f"docs/{file.src_uri}", str(ROOT), config.site_dir, True, dest_uri=f"docs/{file.src_uri}")
        for file in files
        if file.src_dir == config.docs_dir and file.src_uri.endswith(".css")
    ]
    return Files(made)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The first page has no neighbours to show beside it."""
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]
    return markdown
