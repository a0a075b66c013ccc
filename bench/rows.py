"""Benchmark rows: where they were measured, and the files they are kept in."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import fretwork as fw

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


def machine(device: torch.device) -> Row:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": name, "fretwork": fw.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "arch": os.environ.get("FRETWORK_ARCH", "auto"),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def folder(results: Path, facts: Row) -> Path:
    """The folder of a machine's rows."""
    name = facts["device"]
    return results / ("h200" if "H200" in name else "gpu" if "NVIDIA" in name else "cpu")


def store(path: Path, rows: list[Row], identity: tuple[str, ...], unsaid: Row | None = None) -> None:
    """Newer rows replace older ones of the same case, which the keys of `identity` tell apart; `unsaid` has what rows
    that lack a key mean by it."""
    old = json.loads(path.read_text()) if path.exists() else []
    kept = {tuple(str({**(unsaid or {}), **r}.get(k)) for k in identity): r for r in [*old, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in kept.values()) + "\n]\n")


def numbers(text: str, kind: type) -> list[Any]:
    return [kind(x) for x in text.split(",") if x]
