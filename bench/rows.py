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
    that lack a key mean by it.

    Times that only the older row has, as of peers that were left out this time, stay in the newer one as `earlier`,
    each with its date. They were not measured beside the others: tables compare what is in `ms`, and nothing is lost.
    """
    old = json.loads(path.read_text()) if path.exists() else []
    kept: dict[str, Row] = {}
    for row in [*old, *rows]:
        said = {**(unsaid or {}), **row}
        key = json.dumps([said.get(k) for k in identity])  # as a file has it: a tuple is a list there
        kept[key] = {**row, **_earlier(kept.get(key, {}), row)}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(json.dumps(r) for r in kept.values()) + "\n]\n")
    new.replace(path)  # a process that is killed leaves the old rows


class Journal:
    """The rows of a run as they are measured, one on each line of a file, so that a run that is killed can go on.

    The first line says what the run was asked for: rows are taken over by a run of the same question alone. `done`
    has them, by identity. Those of another run that was stopped are `abandoned`.
    """

    def __init__(self, path: Path, question: Row, identity: tuple[str, ...], resume: bool) -> None:
        self._path, self._identity = path, identity
        asked, self.rows = _read_journal(path)
        if resume and asked is not None and asked != _as_in_a_file(question):
            differs = ", ".join(k for k in question if asked.get(k) != _as_in_a_file(question[k]))
            raise SystemExit(f"--resume: expected the options of the run that was stopped, got another {differs}")
        self.abandoned: list[Row] = []
        if not resume:
            self.rows, self.abandoned = [], self.rows
        self.done = {self._key(row) for row in self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        for line in (question, *self.rows):
            self._write(line)

    def __contains__(self, row: Row) -> bool:
        return self._key(row) in self.done

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.done.add(self._key(row))
        self._write(row)

    def remove(self) -> None:
        """When the run is complete."""
        self._file.close()
        self._path.unlink()

    def _key(self, row: Row) -> str:
        return json.dumps([row.get(k) for k in self._identity])

    def _write(self, line: Row) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _as_in_a_file(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _read_journal(path: Path) -> tuple[Row | None, list[Row]]:
    """The question and the rows; a line that a killed process did not finish is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return (lines[0], lines[1:]) if lines else (None, [])


def _earlier(old: Row, new: Row) -> Row:
    """The times of a row that the one in its place has not."""
    if not isinstance(old.get("ms"), dict) or not isinstance(new.get("ms"), dict):
        return {}
    times = old.get("earlier", {}) | {name: {"ms": ms, "date": old.get("date")} for name, ms in old["ms"].items()}
    missing = {name: time for name, time in times.items() if name not in new["ms"]}
    return {"earlier": missing} if missing else {}


def numbers(text: str, kind: type) -> list[Any]:
    return [kind(x) for x in text.split(",") if x]
