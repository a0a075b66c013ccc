"""The programs of the cookbook run as they stand, and its index leads to every page."""

import re

import pytest
from test_readme import FENCE, ROOT, examples

PAGES = [page for page in sorted((ROOT / "docs/cookbook").glob("*.md")) if page.stem != "index"]


def samples():
    for page in PAGES:
        file = str(page.relative_to(ROOT))
        for number, code in enumerate(examples("python", file)):
            yield pytest.param(file, code, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("file, code", list(samples()))
def test_sample(file, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    pytest.importorskip("jax") if "jax" in code else None
    exec(compile(code, file, "exec"), {"__name__": file})


def test_every_page_has_a_program():
    assert len(PAGES) >= 10
    for page in PAGES:
        languages = [language for language, _ in FENCE.findall(page.read_text())]
        assert {"python", "cpp"} & set(languages), page.stem


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs/cookbook/index.md").read_text()
    titles = {page.name: page.read_text().partition("\n")[0].removeprefix("# ") for page in PAGES}
    assert {name: title for title, name in re.findall(r"\[([^\]]+)\]\((\S+)\)", index)} == titles
