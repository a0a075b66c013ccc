"""The examples of the README and the docs run as written."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(os.environ.get("FRETWORK_LIB_DIR", ROOT / "build/release/lib"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(language: str, file: str = "README.md") -> list[str]:
    return [code for kind, code in FENCE.findall((ROOT / file).read_text()) if kind == language]


def test_the_readme_fits_a_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 85
    assert len(examples("python")) == 1 and len(examples("")) == 2


@pytest.mark.parametrize(
    "file, count",
    [
        ("README.md", 1),
        ("docs/block-sparsity.md", 3),
        ("docs/kronecker.md", 3),
        ("docs/dynamic-sparsity.md", 6),
        ("docs/patterns.md", 8),
        ("docs/kernels.md", 2),
        ("docs/many-devices.md", 4),
        ("docs/two-four.md", 4),
        ("docs/whole-models.md", 6),
    ],
)
def test_docs(file, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    codes = examples("python", file)
    assert len(codes) == count
    for code in codes:
        for package in ("jax", "safetensors", "transformers"):
            pytest.importorskip(package) if package in code else None
        exec(compile(code, file, "exec"), {})


def test_every_device_header_is_told():
    told = (ROOT / "docs/kernels.md").read_text().split("## Headers")[1].split("##")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in told.splitlines() if line.startswith("|")))
    assert sorted(named) == sorted(file.stem for file in (ROOT / "src/device").glob("*.cuh"))


@pytest.mark.parametrize("file", ["docs/block-sparsity.md", "docs/two-four.md", "docs/cookbook/cpp.md"])
def test_cpp(file, tmp_path):
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(examples("cpp", file)[0])
    flags = ["-std=c++20", f"-I{ROOT / 'include'}", f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-lfretwork"]
    subprocess.run([compiler, str(source), "-o", str(program), *flags], check=True)
    subprocess.run([str(program)], check=True)


def test_command_line(tmp_path):
    program = LIBRARIES.parent / "bin/fretwork"
    if not program.exists():
        pytest.skip(f"no program at {program}")
    for line in examples("")[1].splitlines():
        subprocess.run(line.replace("fretwork", str(program), 1), shell=True, check=True, cwd=tmp_path)


def anchors(file: Path) -> set[str]:
    """The headings of a page, as links name them."""
    words = (line.lstrip("# ").lower() for line in file.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize(
    "file", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
)
def test_links_lead_somewhere(file):
    page = ROOT / file
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists() and (not anchor or anchor in anchors(there)), target


def test_the_readme_leads_to_a_layer_of_two_factors():
    assert "docs/kronecker.md#a-layer-of-two-factors" in (ROOT / "README.md").read_text()
    assert "KSLinear([(6, 64, 64, 1), (1, 768, 192, 2)])" in examples("python", "docs/kronecker.md")[0]
