"""The documentation site builds strictly, its reference has everything public, and its pictures are of the rows."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/docsite"))
import commonmark  # noqa: E402
import cpp_reference  # noqa: E402
import python_reference  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_every_page_of_the_repository_is_there(site):
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src/ops").glob("*/README.md")]
    assert len(pages) > 40
    for page in pages:
        relative = page.relative_to(ROOT).with_suffix("").as_posix().replace("/README", "").replace("/index", "")
        assert (site / relative.removeprefix("docs/").removeprefix("src/").lower() / "index.html").exists(), page


def test_nothing_is_loaded_from_elsewhere_and_lists_are_lists(site):
    for page in site.rglob("*.html"):
        html = page.read_text()
        assert not re.search(
            r'(?:src|href)="(?:https?:)?//(?!squidfunk|www\.sphinx)[^"]*\.(?:js|css|woff2?|png)', html
        ), page
        body = re.sub(r"<(pre|code|script).*?</\1>", "", html, flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*\n(?:[-*] |\d+\. |\|.*\|$|```)", body, re.MULTILINE), page


def test_every_public_name_of_python_is_in_the_reference(site):
    import fretwork as fw

    page = (site / "reference/python/index.html").read_text()
    functions = [
        name for name in fw.__all__ if name not in ("jit", "kronecker", "nn", "patterns", "recipes", "two_four")
    ]
    missing = [name for name in functions if not re.search(rf'id="fretwork\.({name}\.)?{name}"', page)]
    assert "doc-symbol-module" not in page  # functions, not the modules of their names
    for room in (fw.nn, fw.patterns, fw.kronecker, fw.two_four, fw.recipes, fw.jit):
        page = (site / f"reference/python/{room.__name__.removeprefix('fretwork.')}/index.html").read_text()
        missing += [f"{room.__name__}.{n}" for n in room.__all__ if f'id="{room.__name__}.{n}"' not in page]
    assert not missing


@pytest.mark.parametrize("header", sorted((ROOT / "include/fretwork").glob("*.h")), ids=lambda file: file.stem)
def test_every_declaration_is_in_the_reference(header):
    """Each line of code that is not private, and each word of a comment, is on the header's page."""
    page = cpp_reference.page(header)
    source = cpp_reference.PRIVATE.sub("", header.read_text())
    plain = html.unescape(page.replace("\\", ""))
    for line in source.splitlines():
        stray = line.startswith(("#", "extern", "}")) or cpp_reference.NAMESPACE.match(line)
        words = re.sub(r"^\s*(///|//|/\*|\*/|\*(?= ))\s?|\s*\*/$", "", line).strip()
        assert stray or words in plain, line
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert all(headings) and (headings or header.name == "fretwork.h")


def test_signs_in_comments_are_shown_as_they_are():
    import markdown

    words = "a < b, c[i] | d_e * f_g * h > `x < y`, 1 << 2"
    shown = markdown.markdown(cpp_reference.comment_text([f"/// {words}"]), extensions=["tables"])
    assert html.unescape(re.sub(r"</?(p|code)>", "", shown)) == words.replace("`", "")


def test_pages_are_read_as_commonmark_is():
    text = """Words:
- one
  more of one
  64. is a number
  - inner
    more of inner
- two

1. first
   ```
   code
   ```
   more of first
2. second

x[i][j] and `y[i][j]`
"""
    import markdown

    made = commonmark.to_python_markdown(text)
    shown = markdown.markdown(made, extensions=["sane_lists", "pymdownx.superfences"]).replace("\n", "")
    plain = re.sub(r"</?p>|<div class=.highlight.>|</div>|<span></span>", "", shown)
    assert plain == (
        "Words:<ul><li>onemore of one64. is a number<ul><li>innermore of inner</li></ul></li><li>two</li></ul>"
        "<ol><li>first<pre><code>code</code></pre>more of first</li><li>second</li></ol>"
        "x[i][j] and <code>y[i][j]</code>"
    )
    assert commonmark.links("[a](b.md#c) [d](https://x.org) `[e](f)`\n```\n[g](h)\n```\n") == ["b.md"]


def test_examples_of_docstrings_are_blocks_of_code():
    made = python_reference.fenced("Does.\n\n>>> 1 + 1\n2\n\nMore.")
    assert made == "Does.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def test_the_reference_names_the_commands_of_the_program():
    program = Path(os.environ.get("FRETWORK_LIB_DIR", ROOT / "build/release/lib")).parent / "bin/fretwork"
    if not program.exists():
        pytest.skip(f"no program at {program}")
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^  (\w+) ", told.split("Subcommands:")[1].split("Examples:")[0], re.MULTILINE)
    assert re.findall(r"^\| `fretwork (\w+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE) == commands


def test_plots_are_of_the_rows(tmp_path):
    """After a change of the rows: python bench/plot_families.py."""
    pytest.importorskip("matplotlib")
    import plot_families

    plot_families.main(tmp_path)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == sorted(file.name for file in (ROOT / "docs/benchmarks").glob("*.svg")) and len(drawn) == 12
    for name in drawn:
        numbers = [re.findall(r"-?\d+\.\d+|>([^<>]+)</text>", (folder / name).read_text())
                   for folder in (tmp_path, ROOT / "docs/benchmarks")]  # fmt: skip
        assert numbers[0] == numbers[1], name


def test_overview_and_pages_are_of_the_rows():
    """After a change of the rows: python bench/report.py."""
    import report

    assert "\n".join(report.overview()).rstrip() + "\n" == (ROOT / "docs/benchmarks.md").read_text()
    for family in report.FAMILIES:
        stored = (ROOT / f"docs/benchmarks/{family}.md").read_text()
        assert "\n".join(report.family_page(family)).rstrip() + "\n" == stored
    assert "\n".join(report.scale_page()).rstrip() + "\n" == (ROOT / "docs/benchmarks/scale.md").read_text()
