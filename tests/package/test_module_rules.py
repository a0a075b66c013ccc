"""Which names the Python modules take from each other and from torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "python" / "fretwork"
FILES = sorted(ROOT.rglob("*.py"))
ORIGINAL_NAMES = {"_permute"}  # public in torch-blocksparse


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_module(package: str, name: str) -> bool:
    folder = ROOT.parent.joinpath(*package.split("."))
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


def private_imports(source: str) -> list[str]:
    """Private names, other than modules, that are imported from elsewhere in the package."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [
        f"{node.module}.{alias.name}"
        for node in found
        for alias in node.names
        if is_private(alias.name) and not is_module(node.module or "", alias.name)
    ]


def private_torch(source: str) -> list[str]:
    """What begins with `torch` or `forward_ad` and has a private part, such as `torch._C._nn`."""
    chains = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Attribute, ast.alias))]
    parts = [chain.split(".") for chain in chains if chain.startswith(("torch.", "forward_ad."))]
    return [".".join(names) for names in parts if any(is_private(name) for name in names[1:]) and names[1] != "ops"]


def test_the_rules_find_what_they_should():
    assert private_imports("from fretwork.block import _sdd, sdd") == ["fretwork.block._sdd"]
    assert not private_imports("from fretwork import _shapes\nfrom fretwork._torch import registration")
    assert private_torch("torch._C._nn._parse_to(x)") and private_torch("import torch._dynamo")
    assert private_torch("forward_ad._current_level") and not private_torch("torch.ops.fretwork._nothing(x)")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_stay_where_they_are(file):
    source = file.read_text()
    assert {name.rpartition(".")[2] for name in private_imports(source)} <= ORIGINAL_NAMES
    assert file == ROOT / "_torch" / "private.py" or not private_torch(source)


def test_every_family_has_the_same_name_everywhere():
    """A family is a public module with one of the same name for torch, or for JAX."""
    folders = (ROOT, ROOT / "_torch", ROOT / "jax")
    public, torch, jax = ({file.stem for file in folder.glob("[!_]*.py")} for folder in folders)
    families = public & (torch | jax)
    assert {"attention", "block"} < families and families == jax and families < torch
