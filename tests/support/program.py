"""The program `fretwork`, as tests run it."""

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(os.environ.get("FRETWORK_LIB_DIR") or ROOT / "build/release/lib")
PROGRAM = LIBRARIES.parent / "bin" / "fretwork"


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300, **options)


def ok(*arguments: str, **options) -> str:
    done = run(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def in_terminal(*arguments: str, **environment: str) -> str:
    """What the program writes to a terminal of 60 columns."""
    main, side = pty.openpty()
    subprocess.run(["stty", "cols", "60", "rows", "40"], stdin=side, check=True)
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm", **environment}
    child = subprocess.Popen([PROGRAM, *arguments], stdout=side, stderr=side, env=variables)
    os.close(side)
    written = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(main)
    assert child.wait() == 0
    return written.decode()


def nvrtc_environment() -> dict[str, str]:
    """Points the program at the NVRTC of this Python's packages, where it would not look by itself."""
    for folder in sys.path:
        for file in sorted(Path(folder).glob("nvidia/cu*/lib/libnvrtc.so.1?")):
            return {"FRETWORK_NVRTC": str(file)}
    return {}
