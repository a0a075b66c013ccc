"""Builds the wheel, installs it into a second, clean environment and runs it there, away from the source tree.

The clean environment sees torch through a path file, so that nothing is downloaded twice; Fretwork itself can only come
from the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheel-check"
PROGRAM = """
import jax.numpy as jnp, torch, fretwork as fw, fretwork.jax as fwj
layout = fw.BlockLayout(torch.tensor([[1, 0], [1, 1]]), 16)
values, x = torch.randn(3, 16, 16), torch.randn(32, 5)
error = (fw.dsd(values, x, layout) - layout.unpack(values) @ x).abs().max().item()
assert error < 1e-4, error
same = fwj.dsd(jnp.asarray(values.numpy()), jnp.asarray(x.numpy()), layout)
assert abs(same - fw.dsd(values, x, layout).numpy()).max() < 1e-4
print(fw.__file__, "works: error", error)
"""


def run(*command: str | Path, **options: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FRETWORK_LIB_DIR")}
    subprocess.run([str(c) for c in command], check=True, cwd=FOLDER, env={**environment, **options})


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", FOLDER, ROOT)
    (wheel,) = FOLDER.glob("*.whl")
    assert "-py3-none-" in wheel.name, f"{wheel.name}: expected a wheel for any Python"
    clean = FOLDER / "venv"
    venv.create(clean, with_pip=True, clear=True)
    python = clean / "bin" / "python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    (Path(site.strip()) / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    run(python, "-c", PROGRAM)
    run(clean / "bin" / "fretwork", "info")


if __name__ == "__main__":
    main()
