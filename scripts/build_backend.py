"""scikit-build-core, with torch and jaxlib asked for at build time only where the installing Python lacks them.

The bindings need their headers. An isolated build cannot import what the user has installed, but it runs the same
interpreter, so the headers can be read from where they lie instead of downloading gigabytes a second time.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit
from scikit_build_core.build import (  # noqa: F401  (the hooks that pip calls)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)


def _bindings() -> list[str]:
    site = Path(sysconfig.get_paths()["purelib"])
    needed = []
    if not (site / "torch/include/torch/csrc/stable/library.h").exists():
        needed.append("torch==2.13.0")
    if not (site / "jaxlib/include/xla/ffi/api/ffi.h").exists():
        needed.append("jaxlib>=0.6")
    return needed


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What `pip install .` needs to build."""
    return _scikit.get_requires_for_build_wheel(config_settings) + _bindings()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The same for `pip install -e .`."""
    return _scikit.get_requires_for_build_editable(config_settings) + _bindings()
