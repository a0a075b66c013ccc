"""Checks what may include what: core ← pattern ← runtime ← blocks ← ops ← bindings, tools; device code is closed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"core": 0, "pattern": 1, "runtime": 2, "blocks": 3, "ops": 4}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
BUILT_ON = {"dynamic_attention": "attention"}  # the one op that uses another's problem, plans and kernels
FRAMEWORKS = ("torch/", "xla/", "ATen/", "c10/")


def fault(file: Path, target: str) -> str | None:
    """Why `file`, below the root, may not include `target`; None if it may."""
    parts, into = file.parts, target.split("/")
    below = BUILT_ON.get(parts[2]) if parts[:2] == ("src", "ops") else None
    if target.startswith(FRAMEWORKS) and parts[0] != "bindings":
        return "framework headers belong to bindings/"
    if into[0] == "cuda" or (target.startswith(("cuda", "nvrtc")) and target.endswith(".h") and len(into) == 1):
        return "CUDA headers are not needed: the driver is opened at run time"
    if ".." in into:
        return "files are named from the root of include/ or src/"
    if parts[0] == "include":
        return "public headers know nothing of src/" if into[0] in {*LAYERS, "device", "bindings", "tools"} else None
    if parts[0] != "src":
        return None
    if into[0] in ("bindings", "tools"):
        return f"the library lies below {into[0]}"
    if file.suffix == ".cuh" or file.name == "params.h":
        closed = (
            into[0] == "device"
            or (into[0] == "blocks" and parts[1] == "ops")
            or target.startswith("/".join(parts[1:-1]) + "/")
            or (below is not None and target.startswith(f"ops/{below}/cuda/"))
        )
        device = target.endswith((".cuh", "/params.h"))
        return (
            None if closed and device else "device code includes device code of device/, blocks/ and its own room only"
        )
    if parts[1] == "ops" and into[0] == "ops" and into[1] not in (parts[2], below):
        return "an op does not include another op"
    if parts[1] in LAYERS and into[0] in LAYERS and LAYERS[into[0]] > LAYERS[parts[1]]:
        return f"{parts[1]} lies below {into[0]}"
    return None


def main() -> int:
    everything = [f for top in ("src", "include", "bindings", "tools") for f in sorted((ROOT / top).rglob("*"))]
    files = [f for f in everything if f.suffix in {".h", ".cpp", ".cuh"}]
    found = []
    for path in files:
        file = path.relative_to(ROOT)
        for target in INCLUDE.findall(path.read_text()):
            if reason := fault(file, target):
                found.append(f"{file}: includes {target}: {reason}")
    print("\n".join(found) or f"includes: {len(files)} files follow the rule")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
