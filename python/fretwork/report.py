"""What `fw.sparsify` did to a model, as a page: `python -m fretwork.report model.json` writes model.html.

The program `fretwork` makes the page, as it does those of its benchmarks. The JSON is that of a report:

>>> import tempfile, torch, fretwork as fw
>>> from fretwork.report import write
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = open(f"{folder}/model.json", "w").write(fw.sparsify(model, {"*": fw.recipes.TwoFour()}).to_json())
...     write(f"{folder}/model.json") == f"{folder}/model.html"
True
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from fretwork._library import program_path

__all__ = ["write"]


def write(report: str | os.PathLike[str], html: str | os.PathLike[str] | None = None) -> str:
    """Writes the page of a report's JSON file, beside it unless `html` names another place, and returns its name."""
    source = os.fspath(report)
    page = os.fspath(html) if html is not None else source.removesuffix(".json") + ".html"
    done = subprocess.run([program_path(), "report", source, "--html", page], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().removeprefix("fretwork: "))
    return page


def _main() -> None:
    parser = argparse.ArgumentParser("python -m fretwork.report", description="What fw.sparsify did, as a page.")
    parser.add_argument("report", help="the JSON that its report's to_json() gives")
    parser.add_argument("--html", help="the page (the report's name with .html)")
    given = parser.parse_args()
    try:
        print("wrote", write(given.report, given.html))
    except (ValueError, ImportError) as error:
        sys.exit(f"fretwork.report: {str(error).removeprefix('report: ')}")


if __name__ == "__main__":
    _main()
