"""Pages of the Python reference: each public name of a module, from its docstring, by mkdocstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def module_name(file: Path) -> str:
    """fretwork.block of python/fretwork/block.py."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def public_names(tree: ast.Module) -> list[str]:
    """What `__all__` lists, added parts included; without one, what is defined here."""
    found: list[str] = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign) and any(getattr(t, "id", "") == "__all__" for t in targets):
            found += [str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return found or [name for name in dict.fromkeys(defined) if not name.startswith("_")]


def origin(tree: ast.Module, name: str) -> str | None:
    """The module that a name is imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((n.asname or n.name) == name for n in node.names):
            return node.module
    return None


def title(module: str) -> str:
    """What a module is about: its first sentence up to a colon."""
    path = PACKAGE / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    return re.split(r"[:.]( |$)", first)[0]


def page(file: Path) -> str:
    """The page of a module, in the order of its families where it gathers those of others."""
    tree, module = ast.parse(file.read_text()), module_name(file)
    text = f"# {module}\n\n{fenced(ast.get_docstring(tree) or '')}\n"
    families: dict[str | None, list[str]] = {}
    for name in public_names(tree):
        if not name.startswith("_") and origin(tree, name) != module:  # modules have pages of their own
            families.setdefault(origin(tree, name), []).append(name)
    for family, names in families.items():
        if family is not None and module in ("fretwork", "fretwork.jax"):
            text += f"\n## {title(family)}\n"
        for name in names:
            # A function that has the name of its module hides it in Python, but not from who only reads the sources.
            path = f"{family}.{name}" if family == f"{module}.{name}" else f"{module}.{name}"
            text += f"\n::: {path}\n"
    return text


def fenced(docstring: str) -> str:
    """A docstring whose examples are blocks of code."""
    out: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if line.startswith(">>>") and not inside:
            out += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)
