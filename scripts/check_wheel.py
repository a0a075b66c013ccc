"""Installs the package into a clean environment, as the wheel of `make wheel` and as `pip install -e .`, and runs it.

The clean environment sees torch through a path file, so that nothing is downloaded twice; Fretwork itself can only come
from what is installed. The editable install uses the objects that the wheel was built from.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import make_wheel

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheel-check"
PROGRAM = """
import jax.numpy as jnp, torch, fretwork as fw, fretwork.jax as fwj
layout = fw.BlockLayout(torch.tensor([[1, 0], [1, 1]]), 16)
values, x = torch.randn(3, 16, 16), torch.randn(32, 5)
error = (fw.dsd(values, x, layout) - layout.unpack(values) @ x).abs().max().item()
assert error < 1e-4, error
assert fw.__file__.startswith("PLACE"), fw.__file__
same = fwj.dsd(jnp.asarray(values.numpy()), jnp.asarray(x.numpy()), layout)
assert abs(same - fw.dsd(values, x, layout).numpy()).max() < 1e-4
print(fw.__file__, "works: error", error)
"""


def run(*command: str | Path, **options: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FRETWORK_LIB_DIR")}
    subprocess.run([str(c) for c in command], check=True, cwd=FOLDER, env={**environment, **options})


def clean_environment() -> Path:
    """The Python of a new environment in which nothing is installed; it finds torch where this Python has it."""
    clean = FOLDER / "venv"
    venv.create(clean, with_pip=True, clear=True)
    python = clean / "bin" / "python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    (Path(site.strip()) / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def check(python: Path, place: Path) -> None:
    """The package comes from a folder, and its libraries and its program work."""
    run(python, "-c", PROGRAM.replace("PLACE", str(place)))
    run(python.parent / "fretwork", "info")


def check_requirements(python: Path) -> None:
    """A Python without torch asks for it, whichever way the package is to be installed; for jaxlib only if told to."""
    program = f"""
import sys; sys.path[:0] = [{str(ROOT / "scripts")!r}]
import build_backend, sysconfig
build_backend._folders = lambda: [sysconfig.get_paths()["purelib"]]  # as an isolated build sees them
for hook in (build_backend.get_requires_for_build_wheel, build_backend.get_requires_for_build_editable):
    plain, told = (" ".join(hook(given)) for given in (None, {{build_backend.JAX: "ON"}}))
    assert "torch" in plain and "jaxlib" not in plain and "torch" in told and "jaxlib" in told, (plain, told)
"""
    subprocess.run([python, "-c", program], check=True, cwd=ROOT)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    wheel = make_wheel.build(FOLDER)
    python = clean_environment()
    install = (python, "-m", "pip", "install", "-q", "--no-deps", "--no-index")
    run(*install, wheel)
    check(python, FOLDER)
    check_requirements(python)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "fretwork")
    run(*install, "--no-build-isolation", "-e", ROOT)
    check(python, ROOT / "python")


if __name__ == "__main__":
    main()
