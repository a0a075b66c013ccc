"""Context-parallel attention on 8 to 512 GPUs: kernels measured on one GPU, and a model of all ranks made from them.

    python bench/scale.py measure --seconds 50             # on a GPU: bench/results/h200/scale.json
    python bench/scale.py measure --device cpu --small --out rows.json
    python bench/scale.py model                            # no GPU: bench/results/h200/scale_model.json

`measure` plans a rank's part as `fd.attention` does, and times what that rank computes: steps of its plan (attention of
some rows on one piece of keys) of every kind and of several sizes, what merging and adding costs for a row, what the
host takes for a step, and complete sequences of steps of a rank, with everything but the transfers. Backward includes
the gradients of q, k and v. Measuring stops after --seconds and keeps what it has.

`model` computes the time of a forward and a backward pass from these rows (scale_model.py), for every rank, with the
exact bytes that travel. It predicts the measured sequences too: the check of its sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

import fretwork as fw
from fretwork.distributed import _pieces
from fretwork.distributed._call import Call
from fretwork.distributed._pieces import PiecewiseAttention
from fretwork.distributed._steps import Step
from rows import RESULTS, Row, folder, machine, store
from scale_model import FAMILIES, kind_of, model_rows, rank_plan, rows_in
from timing import as_called, copy_rate, medians

IDENTITY = ("part", "family", "tokens", "world", "rank", "kind", "nnz", "rows", "device", "heads", "depth", "dtype")
MIB = 1 << 20

# What is measured: (family, tokens, ranks, rank). Steps of every family and size first, then complete sequences, then
# the large ones. Rank 0 of longformer has the row that sees all keys.
SIZES: list[tuple[str, int, int, int]] = [
    *(("window", 1 << 17, 8, 1), ("window", 1 << 17, 64, 9), ("window", 1 << 17, 512, 99)),
    *(("causal", 1 << 14, 8, 7), ("causal", 1 << 16, 8, 7), ("causal", 1 << 17, 512, 300), ("causal", 1 << 17, 64, 63)),
    *(("strided", 1 << 17, 8, 4), ("strided", 1 << 17, 64, 32), ("strided", 1 << 17, 512, 300)),
    *(("longformer", 1 << 17, 8, 0), ("longformer", 1 << 17, 64, 9), ("longformer", 1 << 17, 512, 99)),
    *(("sinks", 1 << 17, 8, 1), ("sinks", 1 << 17, 64, 9), ("sinks", 1 << 17, 512, 99)),
]
SEQUENCES: list[tuple[str, int, int, int]] = [
    *(
        ("window", 1 << 20, 64, 9),
        ("causal", 1 << 17, 8, 7),
        ("strided", 1 << 20, 64, 32),
        ("longformer", 1 << 20, 8, 0),
    ),
    *(
        ("sinks", 1 << 20, 64, 9),
        ("window", 1 << 17, 64, 9),
        ("causal", 1 << 18, 64, 50),
        ("longformer", 1 << 20, 64, 9),
    ),
    *(("causal", 1 << 18, 8, 7), ("window", 1 << 20, 8, 1), ("strided", 1 << 20, 8, 4)),
]
LARGE: list[tuple[str, int, int, int]] = [
    *(("causal", 1 << 18, 8, 7), ("window", 1 << 20, 8, 1), ("strided", 1 << 20, 8, 4), ("longformer", 1 << 20, 8, 1)),
    *(
        ("sinks", 1 << 20, 8, 1),
        ("strided", 1 << 20, 64, 32),
        ("longformer", 1 << 20, 8, 0),
        ("strided", 1 << 22, 8, 4),
    ),
    *(("window", 1 << 22, 8, 1), ("causal", 1 << 20, 64, 63)),
]


class OutOfTime(Exception):
    """The limit of the whole measurement is over."""


@dataclass
class Bench:
    """Where and how long is measured, and the rows so far."""

    device: torch.device
    heads: int
    depth: int
    dtype: torch.dtype
    shrink: int  # lengths are divided by it
    out: Path
    until: float
    rows: list[Row]

    def tensors(self, *lengths: int) -> list[Tensor]:
        shapes = [(1, self.heads, length, self.depth) for length in lengths]
        return [torch.randn(s, device=self.device, dtype=self.dtype).requires_grad_() for s in shapes]

    def times(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Medians of a few rounds, in milliseconds."""
        if time.monotonic() > self.until:
            raise OutOfTime
        return {name: round(ms, 5) for name, ms in medians(calls, self.device, rounds=5, seconds=0.4).items()}

    def add(self, part: str, **facts: Any) -> None:
        """Keeps a row, in the file too."""
        dtype = str(self.dtype).removeprefix("torch.")
        row = {**machine(self.device), "part": part, "heads": self.heads, "depth": self.depth, "dtype": dtype, **facts}
        self.rows.append(row)
        store(self.out, [row], IDENTITY)
        left = self.until - time.monotonic()
        told = ", ".join(f"{k} {v}" for k, v in facts.items())
        print(f"{left:5.1f} s left  {part}: {told}", flush=True)


def measure_steps(bench: Bench, family: str, tokens: int, world: int, rank: int) -> None:
    """The smallest and the largest step of each kind in a rank's plan."""
    plan = rank_plan(family, tokens // bench.shrink, world, rank)
    kinds: dict[str, list[Step]] = {}
    for step in plan.steps:
        kinds.setdefault(kind_of(step), []).append(step)
    known = {(r["family"], r["kind"], r["nnz"]) for r in bench.rows if r["part"] == "step"}
    for kind, steps in kinds.items():
        steps.sort(key=lambda step: step.patterns[0].nnz)
        for step in steps[:: max(len(steps) - 1, 1)]:
            if (family, kind, step.patterns[0].nnz) not in known:
                facts = {"family": family, "tokens": tokens // bench.shrink, "world": world, "rank": rank}
                sizes = {"rows": rows_in(step), "keys": step.length, "nnz": step.patterns[0].nnz}
                bench.add("step", **facts, kind=kind, **sizes, ms=step_times(bench, step))


def step_times(bench: Bench, step: Step) -> dict[str, float]:
    q, k, v = bench.tensors(rows_in(step), step.length, step.length)
    pattern = step.patterns[0]
    o, _ = fw.attention(q, k, v, pattern, return_lse=True)
    d = torch.randn_like(o)

    def forward() -> object:
        with torch.no_grad():
            return fw.attention(q, k, v, pattern, return_lse=True)

    return bench.times(
        {"forward": forward, "backward": lambda: torch.autograd.grad(o, (q, k, v), d, retain_graph=True)}
    )


class Arrived:
    """In place of an exchange: what others would send is there at once, and what they would get is packed."""

    noise: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def __init__(
        self, op: str, group: Any, gives: Callable[[int], Sequence[Tensor]], shapes: dict[int, list[Any]], like: Tensor,
        room: int, copies: dict[int, int] | None = None, back: bool = False, tag: int = 0,
    ) -> None:  # fmt: skip
        self._group, self._gives, self._shapes, self._like, self._step = group, gives, shapes, like, -1 if back else 1

    def post(self) -> None:
        """Nothing has to be started."""

    def arrivals(self) -> Iterator[tuple[int, list[Tensor]]]:
        rank, world = self._group.rank(), self._group.size()
        for distance in range(1, world):
            for t in self._gives((rank + self._step * distance) % world):
                t.contiguous()
            source = (rank - self._step * distance) % world
            if shapes := self._shapes.get(source):
                yield source, [self._arrived(tuple(shape)) for shape in shapes]

    def _arrived(self, shape: tuple[int, ...]) -> Tensor:
        if shape not in Arrived.noise:
            Arrived.noise[shape] = torch.randn(shape, device=self._like.device, dtype=self._like.dtype)
        return Arrived.noise[shape]


@contextmanager
def nothing_travels() -> Iterator[None]:
    real = _pieces.Exchange
    _pieces.Exchange = Arrived  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        _pieces.Exchange = real  # type: ignore[misc]
        Arrived.noise.clear()


def sequence(
    bench: Bench, family: str, tokens: int, world: int, rank: int
) -> tuple[int, dict[str, Callable[[], object]]]:
    """A rank's steps, and all that it computes forward and backward."""
    group = cast(Any, SimpleNamespace(rank=lambda: rank, size=lambda: world))
    pattern = FAMILIES[family](tokens)
    shards = fw.distributed.shard(pattern, world)
    rows, keys = tuple(shards.ranges), tuple(shards.key_ranges)
    call = Call((pattern,), rows, keys, bench.heads, group, None, 0.0, "ieee", None, None, False, True)
    (first, last), (begin, end) = rows[rank], keys[rank]
    q, k, v = bench.tensors(last - first, end - begin, end - begin)

    def run() -> Tensor:
        o: Tensor = PiecewiseAttention.apply(q, k, v, None, None, call)[0]
        return o

    def forward() -> object:
        with torch.no_grad():
            return run()

    o = run()
    d = torch.randn_like(o)
    calls = {"forward": forward, "backward": lambda: torch.autograd.grad(o, (q, k, v), d, retain_graph=True)}
    return len(call.plan.steps), cast(dict[str, Callable[[], object]], calls)


def measure_sequence(bench: Bench, family: str, tokens: int, world: int, rank: int) -> None:
    tokens //= bench.shrink
    with nothing_travels():
        steps, calls = sequence(bench, family, tokens, world, rank)
        ms = bench.times(calls)
        called = {name: round(as_called(call, bench.device, count=5), 4) for name, call in calls.items()}
    facts = {"family": family, "tokens": tokens, "world": world, "rank": rank}
    bench.add("rank", **facts, steps=steps, ms=ms, as_called_ms=called)


def measure_host(bench: Bench) -> None:
    """Of a sequence of tiny steps, what one takes in a plain loop of calls: the host's time, where it is the longer."""
    world = 8 if bench.shrink > 1 else 64
    with nothing_travels():
        steps, calls = sequence(bench, "causal", 128 * world, world, world - 1)
        ms = {name: as_called(call, bench.device, count=5) / steps for name, call in calls.items()}
    bench.add("host", steps=steps, us={name: round(1e3 * each, 2) for name, each in ms.items()})


def measure_rows_alone(bench: Bench) -> None:
    """Merging the results of rows with what they have, and adding gradients of rows to a sum."""
    for n in (1 << 12, 1 << 16):
        n //= bench.shrink
        with torch.no_grad():
            q, o, v = bench.tensors(n, n, n)
            lse = torch.randn(q.shape[:3], device=bench.device)
            rows, total = _pieces._Rows(q, v), _pieces._Sum(q)
            first, step = (cast(Step, SimpleNamespace(rows=(0, n), merges=merges)) for merges in (False, True))
            rows.add(first, o, lse)
            rows.add(step, o, lse)
            total.add(0, n - 1, q[:, :, 1:])
            calls: dict[str, Callable[[], object]] = {
                "merge": lambda rows=rows, step=step, o=o, lse=lse: rows.add(step, o, lse),  # type: ignore[misc]
                "sum": lambda total=total, q=q, n=n: total.add(0, n, q),  # type: ignore[misc]
            }
            bench.add("row", rows=n, ms=bench.times(calls))
    bench.add("copy", gb_per_s=round(copy_rate(bench.device) / 1e6, 1))


def measure(bench: Bench) -> None:
    parts: list[Callable[[], None]] = []
    for case in SIZES:
        parts.append(lambda case=case: measure_steps(bench, *case))  # type: ignore[misc]
    parts += [lambda: measure_rows_alone(bench), lambda: measure_host(bench)]
    for case in SEQUENCES:
        parts.append(lambda case=case: measure_sequence(bench, *case))  # type: ignore[misc]
    for case in LARGE:
        parts.append(lambda case=case: measure_steps(bench, *case))  # type: ignore[misc]
    for n, part in enumerate(parts):
        try:
            part()
        except OutOfTime:
            print(f"out of time: {len(parts) - n} of {len(parts)} parts left out", flush=True)
            break
        except torch.OutOfMemoryError as error:
            print(f"left out: {str(error).splitlines()[0]}", flush=True)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_command(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    torch.manual_seed(0)
    small = options.small
    out = options.out or folder(RESULTS, machine(device)) / "scale.json"
    bench = Bench(
        device, 2 if small else 16, 32 if small else 128, torch.bfloat16 if device.type == "cuda" else torch.float32,
        64 if small else 1, out, time.monotonic() + options.seconds, [],
    )  # fmt: skip
    print(f"{machine(device)['device']}: rows go to {out}", flush=True)
    measure(bench)
    print(f"{len(bench.rows)} rows in {out}", flush=True)


def model_command(options: argparse.Namespace) -> None:
    path = options.rows or RESULTS / "h200/scale.json"
    out = options.out or path.with_name("scale_model.json")
    model_rows(path, out, options.tokens, options.worlds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    at = commands.add_parser("measure", help="times on this machine")
    at.add_argument("--device", default="cuda")
    at.add_argument("--small", action="store_true", help="short sequences of two heads, to try the program")
    at.add_argument("--seconds", type=float, default=50, help="after which nothing more is begun")
    at.add_argument("--out", type=Path, help="the file of the rows")
    at.set_defaults(run=measure_command)
    of = commands.add_parser("model", help="times of many ranks from the rows of measure")
    of.add_argument("--rows", type=Path, help="the file of measure")
    of.add_argument("--out", type=Path, help="the file of the modelled rows")
    of.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], help="lengths")
    of.add_argument("--worlds", type=lambda text: [int(x) for x in text.split(",")], help="numbers of GPUs")
    of.set_defaults(run=model_command)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
