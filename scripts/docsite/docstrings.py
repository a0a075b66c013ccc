"""A Griffe extension: the examples in docstrings are shown as blocks of code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import python_reference


class Examples(griffe.Extension):  # type: ignore[misc]
    """Puts a fence around what a docstring shows at a prompt."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = python_reference.fenced(obj.docstring.value)
