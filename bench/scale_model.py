"""The time of context-parallel attention on many GPUs, from measured kernels and the bytes that travel.

Every rank's steps are those of `fd.attention`, from the same planner, and so are the keys that it needs. A step takes
what a step of its kind and its number of elements was measured to take, and what merging and adding its rows takes; at
least the host's time for a step. Between measured sizes times are interpolated (logarithms of both), beyond the
largest they grow with the elements, below the smallest they stay.

Transfers follow the rounds of `_exchange.py`: in round d a rank sends d ranks ahead, a round begins when it is posted
and the one before has ended, and a step waits for the round that brings its keys. A transfer begins when both
sides are ready and takes LATENCY and its bytes over the rate of the link. The pass ends with the slowest rank.

Left out: what transfers cost the kernels beside them, congestion of the network, and jitter.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fretwork as fw
import fretwork.distributed as fd
from fretwork.distributed import _steps
from fretwork.distributed._steps import Plan, Step, plan_of
from rows import Row

Array = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

# Rates in bytes a millisecond, one direction. NVLink 4 has 450 GB/s on paper (H200 data sheet); NCCL reaches 370
# (NVIDIA/nccl-tests issue 212). NDR InfiniBand has 400 Gb/s for each GPU; NCCL reaches 48 GB/s (nccl-tests issue 267).
NVLINK = 370e6
INFINIBAND = 48e6
NODE = 8  # GPUs
# Milliseconds of a small message: nccl-tests' sendrecv_perf (nccl-tests issue 214), between two GPUs of a node.
LATENCY = 0.03
MEMORY = 141e9  # bytes of an H200
BYTES = 2  # of an element of bf16

TOKENS = (1 << 17, 1 << 20, 1 << 22, 1 << 24)
WORLDS = (8, 16, 32, 64, 128, 256, 512)
FAMILIES = {
    "window": lambda n: fw.patterns.sliding_window(n, 4095, 0),
    "sinks": lambda n: fw.patterns.sinks(n, 4, 4096),
    "longformer": lambda n: fw.patterns.longformer(n, 512, (0,)),
    "strided": lambda n: fw.patterns.strided(n, 1024),
    "causal": fw.patterns.causal,
}
THIN = 16  # rows or keys
KINDS = ("own", "row", "column", "far")
KEPT = Path(__file__).resolve().parent.parent / "build/scale"


# Plans


@functools.lru_cache(maxsize=64)
def shards_of(family: str, tokens: int, world: int) -> fd.Shards:
    return fd.shard(FAMILIES[family](tokens), world)


def rank_rows(family: str, tokens: int, world: int) -> Array:
    return np.array([last - first for first, last in shards_of(family, tokens, world).ranges], np.float64)


def rank_plan(family: str, tokens: int, world: int, rank: int) -> Plan:
    """What `fd.attention` computes on a rank, with rows cut by `fd.shard`."""
    shards = shards_of(family, tokens, world)
    return plan_of((shards.pattern,), tuple(shards.ranges), tuple(shards.key_ranges), rank, False)


def rows_in(step: Step) -> int:
    return step.rows[1] - step.rows[0]


def kind_of(step: Step) -> str:
    """Steps on a rank's own keys and its halo, and on far keys: many of both, few rows, or few keys."""
    if not step.merges:
        return "own"
    return "row" if rows_in(step) <= THIN else "column" if step.length <= THIN else "far"


class Steps(NamedTuple):
    """Steps of one or of all ranks, an array of each fact."""

    rank: Integers
    distance: Integers  # to the last peer whose keys it waits for; 0: it waits for none
    kind: Integers
    nnz: Integers
    rows: Integers
    own: Integers  # keys and values of the rank itself whose gradients are added to others; 0 in a rank's first step
    sums: Integers  # rows whose gradients are


def steps_of(rank: int, world: int, steps: Iterable[Step]) -> list[tuple[int, ...]]:
    """The facts of a rank's steps. The first needs no sums."""
    found: list[tuple[int, ...]] = []
    for n, step in enumerate(steps):
        distance = max(((rank - source.peer) % world for source in step.sources), default=0)
        rows, nnz = rows_in(step), step.patterns[0].nnz
        own = 2 * (step.own[1][1] - step.own[1][0]) if step.own and n else 0
        found.append((rank, distance, KINDS.index(kind_of(step)), nnz, rows, own, rows if n else 0))
    return found


def as_steps(facts: Integers) -> Steps:
    return Steps(*facts.reshape(-1, len(Steps._fields)).T)


def planned(family: str, tokens: int, world: int) -> tuple[Steps, Integers]:
    """All ranks' steps, and the keys that each receives from the rank so far behind. Planning takes a while (a
    quarter of a million steps on 512 ranks), so plans are kept in the build folder until the planner changes."""
    shards = shards_of(family, tokens, world)
    version = hashlib.blake2b(Path(_steps.__file__).read_bytes() + shards.pattern.text.encode(), digest_size=8)
    path = KEPT / f"{version.hexdigest()}-{world}.npz"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        facts, received = _planned(shards, world)
        np.savez_compressed(path, facts=facts, received=received)
    with np.load(path) as kept:
        return as_steps(kept["facts"]), kept["received"]


def _planned(shards: fd.Shards, world: int) -> tuple[Integers, Integers]:
    patterns, keys = (shards.pattern,), tuple(shards.key_ranges)
    received = np.zeros((world, world), np.int64)
    facts: list[tuple[int, ...]] = []
    for rank, rows in enumerate(shards.ranges):
        needs = _steps._needs(patterns, rows, keys)
        needs.pop(rank, None)
        for peer, ranges in needs.items():
            received[rank, (rank - peer) % world] = sum(b - a for a, b in ranges)
        facts += steps_of(rank, world, _steps._Planner(patterns, rows, keys, rank, needs, False).steps())
    return np.array(facts, np.int64), received


# Costs


class Costs:
    """Milliseconds, from the rows of `measure`."""

    def __init__(self, rows: list[Row]) -> None:
        self.heads, self.depth = int(rows[0]["heads"]), int(rows[0]["depth"])
        self._steps: dict[tuple[str, str], list[Row]] = {}
        for r in sorted((r for r in rows if r["part"] == "step"), key=lambda r: int(r["nnz"])):
            self._steps.setdefault((r["family"], r["kind"]), []).append(r)
        alone = max((r for r in rows if r["part"] == "row"), key=lambda r: int(r["rows"]))
        self.merge, self.sum = (alone["ms"][name] / alone["rows"] for name in ("merge", "sum"))
        self.copy = 1e-6 / next(r["gb_per_s"] for r in rows if r["part"] == "copy")
        host = next(r["us"] for r in rows if r["part"] == "host")
        self.host = {name: us / 1e3 for name, us in host.items()}
        self._curves: dict[tuple[str, str, str], tuple[Array, Array]] = {}

    @property
    def key_bytes(self) -> int:
        """Of a key and its value in all heads."""
        return 2 * self.heads * self.depth * BYTES

    def kernels(self, family: str, kind: str, nnz: Integers, which: str) -> Array:
        """Times of steps of some elements."""
        sizes, times = self._curve(family, kind, which)
        beyond = np.exp(times[-1] - sizes[-1]) * nnz
        between: Array = np.exp(np.interp(np.log(np.maximum(nnz, 1)), sizes, times))
        return np.where(nnz > np.exp(sizes[-1]), beyond, between)

    def _curve(self, family: str, kind: str, which: str) -> tuple[Array, Array]:
        """Logarithms of elements and times."""
        key = family, kind, which
        if key not in self._curves:
            self._curves[key] = self._measured(family, kind, which)
        return self._curves[key]

    def _measured(self, family: str, kind: str, which: str) -> tuple[Array, Array]:
        alike = [name for name, of in self._steps if of == kind]
        rows = self._steps.get((family, kind)) or self._steps.get((alike[0], kind) if alike else (family, "own"), [])
        by_size: dict[int, list[float]] = {}
        for r in rows:
            by_size.setdefault(r["nnz"], []).append(r["ms"][which])
        sizes = sorted(by_size)
        return np.log(sizes), np.log([float(np.median(by_size[n])) for n in sizes])

    def best(self, family: str, which: str) -> float:
        """An element's time in the family's most efficient step."""
        steps = [r for (name, _), found in self._steps.items() if name == family for r in found]
        return float(min(r["ms"][which] / r["nnz"] for r in steps))

    def steps(self, family: str, steps: Steps, rank_rows: Array) -> tuple[Array, Array]:
        """Forward and backward, with what is done to rows; `rank_rows` are those of each rank."""
        forward, backward = np.zeros((2, len(steps.rank)))
        for n, kind in enumerate(KINDS):
            at = steps.kind == n
            forward[at] = self.kernels(family, kind, steps.nnz[at], "forward")
            backward[at] = self.kernels(family, kind, steps.nnz[at], "backward")
        added, own = steps.sums + steps.own, steps.kind == KINDS.index("own")
        all_rows = rank_rows[steps.rank]
        part, first = steps.rows < all_rows, steps.sums == 0
        forward += np.where(own, 0, self.merge * steps.rows)
        backward += self.sum * np.where(first & part, steps.rows, added)
        # Copies: queries of a step, and what it writes into a larger result; backward queries, results and gradients,
        # and where there are several steps sums in fp32 (begun, and rounded at the end) of queries, keys and values.
        several = np.bincount(steps.rank, minlength=len(rank_rows))[steps.rank] > 1
        copied = self.copy * self.key_bytes / 2
        forward += copied * steps.rows * (2 + 3 * (own & part))
        backward += copied * (6 * steps.rows + 15 * all_rows * (first & several))
        return np.maximum(forward, self.host["forward"]), np.maximum(backward, self.host["backward"])


# Ranks


@dataclass
class Ranks:
    """All ranks of a case. Columns are distances: what comes from, or waits for, the rank that far behind."""

    received: Array  # keys
    forward: Array  # ms of steps
    backward: Array
    again: Array  # whether received keys are sent again for the gradient
    rows: Array

    @property
    def world(self) -> int:
        return len(self.rows)

    @property
    def sent(self) -> Array:
        """Keys to the rank that far ahead."""
        return sent_of(self.received)


def sent_of(received: Array) -> Array:
    """By rank and distance ahead, what is received by rank and distance behind."""
    ranks, distances = np.arange(len(received))[:, None], np.arange(len(received))[None]
    found: Array = received[(ranks + distances) % len(received), distances]
    return found


def ranks_of(family: str, tokens: int, world: int, costs: Costs) -> Ranks:
    steps, received = planned(family, tokens, world)
    rows = rank_rows(family, tokens, world)
    forward, backward = np.zeros((2, world, world))
    for into, times in zip((forward, backward), costs.steps(family, steps, rows), strict=True):
        np.add.at(into, (steps.rank, steps.distance), times)
    again = received.sum(1) > _steps._KEPT * tokens // world
    return Ranks(received.astype(float), forward, backward, again, rows)


def link_times(sizes: Array, direction: int, distance: int) -> Array:
    """Milliseconds of each rank's message of some bytes to the rank at a distance, ahead (1) or behind (−1)."""
    ranks = np.arange(len(sizes))
    near = ranks // NODE == (ranks + direction * distance) % len(sizes) // NODE
    found: Array = np.where(sizes > 0, LATENCY + sizes / np.where(near, NVLINK, INFINIBAND), 0.0)
    return found


class Coming(NamedTuple):
    """A round of a rank: the bytes of memory that it takes, and when the rank is done with its work."""

    size: float
    done: float


def posted_at(rounds: list[Coming], size: float, room: float, begin: float, own_done: float) -> float:
    """When a round of some size is posted behind others: with the first of these that leaves room, or two."""
    awaited, total = len(rounds), size
    while awaited and (len(rounds) - awaited < 2 or total + rounds[awaited - 1].size <= room):
        awaited -= 1
        total += rounds[awaited].size
    if awaited:
        return rounds[awaited - 1].done
    return begin if not rounds or total <= room else own_done


@dataclass
class Messages:
    """Of an exchange, by rank and distance: bytes that are sent, and those of them for which copies are made."""

    sent: Array
    copied: Array
    pack: float  # ms of a byte before it is sent
    room: float  # bytes
    direction: int = 1


def pipeline(begin: Array, own: Array, work: Array, messages: Messages) -> Array:
    """When each rank is done with the rounds of an exchange and the work that waits for them.

    As `Exchange` does, rounds are posted at `begin` while there is room, at least one; behind the rank's `own` work at
    least three; and then behind the work of each round.
    """
    world, sent, direction = len(begin), messages.sent, messages.direction
    ranks = np.arange(world)
    rounds: list[list[Coming]] = [[] for _ in ranks]
    tail, free = begin + own, begin.copy()
    for distance in range(1, world):
        to, source = (ranks + direction * distance) % world, (ranks - direction * distance) % world
        gives, gets = sent[:, distance] > 0, sent[source, distance] > 0
        takes = gives | gets
        if not takes.any():
            continue
        sizes = sent[source, distance] + messages.copied[:, distance]
        posts = [posted_at(rounds[r], sizes[r], messages.room, begin[r], begin[r] + own[r]) for r in ranks]
        ready = np.maximum(posts, free) + messages.pack * sent[:, distance]
        arrival = np.maximum(ready, ready[to]) + link_times(sent[:, distance], direction, distance)
        end = np.maximum(np.where(gives, arrival, ready), np.where(gets, arrival[source], ready))
        done = np.maximum(tail, end) + work[:, distance]
        tail, free = np.where(takes, done, tail), np.where(takes, end, free)
        for r in ranks[takes]:
            rounds[r].append(Coming(sizes[r], done[r]))
    return tail


def keys_sent(ranks: Ranks, costs: Costs, received: Array) -> Messages:
    """The messages of keys and values by which ranks receive so many keys."""
    sent = sent_of(received)
    copied = np.where(sent < ranks.rows[:, None], sent, 0) * costs.key_bytes
    return Messages(sent * costs.key_bytes, copied, 2 * costs.copy, room_of(ranks, costs))


def room_of(ranks: Ranks, costs: Costs) -> float:
    """Bytes that rounds under way may take."""
    return _steps._AHEAD * float(ranks.rows.sum()) / ranks.world * costs.key_bytes


def forward_ends(ranks: Ranks, costs: Costs) -> Array:
    return pipeline(np.zeros(ranks.world), ranks.forward[:, 0], ranks.forward, keys_sent(ranks, costs, ranks.received))


def backward_ends(ranks: Ranks, costs: Costs) -> Array:
    """Keys come again where they were not kept, behind them the gradients return."""
    own, others = ranks.backward[:, 0], ranks.backward.copy()
    others[:, 0] = 0
    again = ranks.again.astype(float)[:, None]
    first = np.where(ranks.again, own, others.sum(1))
    tail = pipeline(np.zeros(ranks.world), first, others * again, keys_sent(ranks, costs, ranks.received * again))
    # A rank's gradients go to who sent the keys; the owner adds them. They lie where they were computed.
    adds = ranks.sent * 2 * costs.sum
    returned, none = ranks.received * costs.key_bytes, np.zeros_like(ranks.received)
    messages = Messages(returned, none, 2 * costs.copy, room_of(ranks, costs), direction=-1)
    return pipeline(tail, own * (1 - again[:, 0]), adds, messages)


# The peers


def slowest_link(world: int) -> float:
    return NVLINK if world <= NODE else INFINIBAND


def all_gather_ms(tokens: int, world: int, costs: Costs) -> float:
    """All keys and values on every rank. A node takes what it lacks by all of its links at once."""
    size, nodes = tokens * costs.key_bytes, -(-world // NODE)
    between = size * (nodes - 1) / nodes / (NODE * INFINIBAND)
    within = size * (world - 1) / world / NVLINK
    return LATENCY * math.ceil(math.log2(world)) + max(between, within)


def ring_ms(tokens: int, world: int, costs: Costs, tensors: int) -> float:
    """Rounds in which every rank passes `tensors` (2: keys and values) of its size to the next."""
    size = tokens / world * costs.key_bytes * tensors / 2
    return (world - 1) * (LATENCY + size / slowest_link(world))


def peers(family: str, tokens: int, world: int, costs: Costs) -> dict[str, float]:
    """Both with rows balanced perfectly and kernels at their best rate. All-gather keeps keys and values for the
    gradient and computes when all are there; the ring hides its rounds behind work, or work behind its rounds."""
    nnz = FAMILIES[family](tokens).nnz / world
    forward, backward = (nnz * costs.best(family, which) for which in ("forward", "backward"))
    gather = all_gather_ms(tokens, world, costs)
    ring = max(forward, ring_ms(tokens, world, costs, 2)) + max(backward, ring_ms(tokens, world, costs, 4))
    return {"ideal": forward + backward, "all_gather": forward + backward + 2 * gather, "ring": ring}


# Rows


def memory_of(ranks: Ranks, costs: Costs) -> float:
    """Bytes of the largest rank in a pass: q, k, v, the result and all gradients, a sum in fp32, and kept keys."""
    kept = np.where(ranks.again, 2 * ranks.received.max(1), ranks.received.sum(1))
    each = ranks.rows * 10 * costs.key_bytes / 2 + 2 * kept * costs.key_bytes
    return float(each.max())


def figures(value: float) -> float:
    """Four of them."""
    return float(f"{value:.4g}")


def model_row(family: str, tokens: int, world: int, costs: Costs) -> Row:
    ranks = ranks_of(family, tokens, world, costs)
    forward, backward = float(forward_ends(ranks, costs).max()), float(backward_ends(ranks, costs).max())
    others = peers(family, tokens, world, costs)
    rounded = {name: figures(ms) for name, ms in (("forward", forward), ("backward", backward), *others.items())}
    whole = 2 * tokens * costs.key_bytes  # keys, values and their gradients
    return {
        "part": "model", "family": family, "pattern": FAMILIES[family](tokens).text, "tokens": tokens, "world": world,
        "ms": rounded, "efficiency": round(float(others["ideal"] / (forward + backward)), 4),
        "compute_ms": figures((ranks.forward.sum(1) + ranks.backward.sum(1)).max()),
        "received_gb": figures(ranks.received.sum(1).max() * costs.key_bytes / 1e9),
        "sent_gb": figures(ranks.sent.sum(1).max() * costs.key_bytes / 1e9),
        "fits": {
            "ours": memory_of(ranks, costs) < MEMORY,
            "all_gather": whole + tokens / world * 10 * costs.key_bytes / 2 < MEMORY,
            "ring": tokens / world * 14 * costs.key_bytes / 2 < MEMORY,
        },
    }  # fmt: skip


def check_row(row: Row, costs: Costs) -> Row:
    """The model's sum for a measured sequence of steps, called in a plain loop, in which nothing travels."""
    family, tokens, world, rank = row["family"], row["tokens"], row["world"], row["rank"]
    plan = rank_plan(family, tokens, world, rank)
    steps = as_steps(np.array(steps_of(rank, world, plan.steps), np.int64))
    works = [float(times.sum()) for times in costs.steps(family, steps, rank_rows(family, tokens, world))]
    given = sum(places.count for places in plan.gives.values())
    received = sum(plan.receives.values())
    packed = 2 * costs.copy * costs.key_bytes
    forward = works[0] + given * packed
    returned = received * packed + given * 2 * costs.sum
    backward = works[1] + returned + (given * packed if plan.fetches_again[rank] else 0)
    predicted = {"forward": round(forward, 4), "backward": round(backward, 4)}
    facts = {name: row[name] for name in ("family", "tokens", "world", "rank", "steps")}
    return {"part": "check", **facts, "measured": row["as_called_ms"], "predicted": predicted}


def model_rows(path: Path, out: Path, tokens: list[int] | None, worlds: list[int] | None) -> None:
    """Writes the modelled rows of the measured ones, and the check."""
    measured = json.loads(path.read_text())
    costs = Costs(measured)
    first = measured[0]
    facts = {name: first[name] for name in ("device", "torch", "date", "heads", "depth", "dtype")}
    found = [check_row(r, costs) for r in measured if r["part"] == "rank" and r["steps"]]
    for family in FAMILIES:
        for length in tokens or TOKENS:
            for world in worlds or WORLDS:
                found.append(model_row(family, length, world, costs))
                print(found[-1], flush=True)
    out.write_text("[\n" + ",\n".join(json.dumps({**facts, **row}) for row in found) + "\n]\n")
    print(out)
