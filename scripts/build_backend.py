"""scikit-build-core, which also says on the terminal how long the build takes and how far it is.

The bindings need the headers of torch and jaxlib. An isolated build cannot import what the user has installed, but it
runs the same interpreter, so the headers are read from where they lie instead of downloading gigabytes a second time.
torch is asked for where it is missing. The JAX binding is built where jaxlib is there, or where the user asks for it:
`pip install . -C cmake.define.FRETWORK_JAX=ON`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from scikit_build_core import build as _scikit
from scikit_build_core.build import (  # noqa: F401  (the hooks that pip calls)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel"
JAX = "cmake.define.FRETWORK_JAX"
SECONDS = 4.0  # a file takes one core, without ccache
Settings = dict[str, Any] | None


def _folders() -> list[str]:
    return [*sys.path, sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]


def _has(header: str) -> bool:
    return any((Path(folder) / header).exists() for folder in _folders())


def _has_jaxlib() -> bool:
    return _has("jaxlib/include/xla/ffi/api/ffi.h")


def _bindings(config_settings: Settings) -> list[str]:
    needed = []
    if not _has("torch/include/torch/csrc/stable/library.h"):
        needed.append("torch==2.13.0")
    if not _has_jaxlib() and str((config_settings or {}).get(JAX, "")).upper() in ("1", "ON", "TRUE", "YES"):
        needed.append("jaxlib>=0.6")
    return needed


def _settings(config_settings: Settings) -> dict[str, Any]:
    """The user's, and no JAX binding where neither the user nor the environment wants one."""
    return {**({} if _has_jaxlib() else {JAX: "OFF"}), **(config_settings or {})}


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What `pip install .` needs to build."""
    return _scikit.get_requires_for_build_wheel(config_settings) + _bindings(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same for `pip install -e .`."""
    return _scikit.get_requires_for_build_editable(config_settings) + _bindings(config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """The wheel, told about."""
    settings = _settings(config_settings)
    with _told(settings):
        return _scikit.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """What `pip install -e .` installs, told about."""
    settings = _settings(config_settings)
    with _told(settings):
        return _scikit.build_editable(wheel_directory, settings, metadata_directory)


def _terminal() -> TextIO | None:
    """The user's; pip keeps what a build prints to itself unless it is told -v."""
    try:
        return open("/dev/tty", "w")
    except OSError:
        return None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else "a minute" if seconds >= 45 else "less than a minute"


def beforehand(files: int, cores: int, jax: bool) -> str:
    """What the user is told first."""
    kept = "less with what ccache has" if shutil.which("ccache") else "with ccache the next time is quick"
    bindings = "for torch and JAX" if jax else f"for torch (not for JAX: no jaxlib here; -C {JAX}=ON builds it)"
    return (
        f"compiling {files} files on {cores} cores, {bindings}. This takes about "
        f"{_minutes(files * SECONDS / cores)}; {kept}. `pip install -v .` shows every step."
    )


def compiled(build: Path) -> int:
    """How many files ninja has compiled in a folder."""
    log = build / ".ninja_log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return sum(".cpp.o" in line for line in lines)


@contextlib.contextmanager
def _told(settings: dict[str, Any], every: float = 15.0) -> Iterator[None]:
    """Says beforehand how long the build takes, and from time to time how far it is."""
    # The compiler sees paths below the source folder, so that ccache knows what `make` has built.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    terminal = _terminal()
    if terminal is None:
        yield
        return
    files = sum(len(list((ROOT / top).rglob("*.cpp"))) for top in ("src", "tools", "bindings"))
    cores = int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", len(os.sched_getaffinity(0))))
    before, begin, done = compiled(BUILD), time.monotonic(), threading.Event()

    def say(text: str) -> None:
        print(f"\r{text}", file=terminal, flush=True)

    def watch() -> None:
        last = 0
        while not done.wait(every):
            count = compiled(BUILD) - before
            if count > last:
                left = (time.monotonic() - begin) * (files - count) / count
                say(f"fretwork: {count} of {files} files compiled, {_minutes(max(left, 0))} left")
            last = max(last, count)

    say("\nfretwork: " + beforehand(files, cores, str(settings.get(JAX, "ON")).upper() == "ON"))
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        say(f"fretwork: built in {time.monotonic() - begin:.0f} s")
    finally:
        done.set()
        watcher.join()
        terminal.close()
