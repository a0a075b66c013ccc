"""Several NCCL ranks on one GPU: attention over ranks and cut layers against one process, on streams that are late.

    PYTHONPATH=python python3 tests/distributed/nccl_check.py                            # 2 ranks, then 4, on one GPU
    PYTHONPATH=python python3 tests/distributed/nccl_check.py --backend gloo --device cpu  # the same checks on a CPU

A line for each case, and last "N passed, N failed". NCCL 2.30 takes several ranks on one GPU where
NCCL_MULTI_RANK_GPU_ENABLE is set. Older ones refuse that, but not ranks of different hosts: each rank gets a name of
its own as NCCL_HOSTID, and what it sends goes through sockets of the loopback device. Lines say which, `flag` or
`hosts`.

Each case runs several times on a stream whose inputs are NaN until work that is queued before has written them, and
memory that is freed is overwritten at once. All runs have the same bits, forward and backward. They are compared with
`fw.attention` of the whole sequence in the same process, and the elements that were received with `Shards.needs`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import faulthandler
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fretwork as fw
import fretwork.distributed as fd
from fretwork._torch.private import gpu_sleep
from fretwork.distributed._steps import plan_of

GROUP_SECONDS = 30  # the timeout of a group's operations
START_SECONDS = 25  # of processes and their group, on a GPU's machine
MOST_SECONDS = 90  # after which everything is killed
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2}  # of the largest magnitude
BATCH, DEPTH = 2, 64


@dataclass(frozen=True)
class Options:
    backend: str
    device: str
    length: int
    repeats: int
    seconds: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Case:
    """An attention over ranks. `text` has the length as {n}, and a place in its second half as {far}."""

    text: str
    dtype: torch.dtype
    heads: tuple[int, int] = (4, 4)
    balanced: bool = False  # ranges of equal work, else of equal length
    sinks: bool = False
    padding: bool = False
    method: str = "ranges"

    @property
    def name(self) -> str:
        marks = [str(self.dtype).removeprefix("torch.")]
        marks += [f"{self.heads[0]} heads on {self.heads[1]}"] if self.heads[0] != self.heads[1] else []
        marks += [name for name in ("balanced", "sinks", "padding") if getattr(self, name)]
        marks += [self.method] if self.method != "ranges" else []
        return ", ".join([self.text.replace("{n}", "S").replace("{far}", "S/2"), *marks])


F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case("sliding_window({n},200,0)", BF16),
    Case("sliding_window({n},200,0)", F32),
    Case("sliding_window({n},100,100)", BF16, heads=(8, 2), balanced=True),
    Case("causal({n})", BF16),
    Case("causal({n})", F32, balanced=True),
    Case("causal({n})", BF16, heads=(8, 2), balanced=True),
    Case("strided({n},32)", BF16, balanced=True),
    Case("strided({n},32)", F32),
    Case("longformer({n},50,(0,{far}))", BF16, balanced=True),
    Case("longformer({n},50,(0,{far}))", F32),
    Case("sinks({n},4,150)", BF16, sinks=True),
    Case("sliding_window({n},100,0)", F32, sinks=True),
    Case("causal({n})", BF16, padding=True),
    Case("full({n})", BF16, heads=(4, 1)),
    Case("causal({n})", BF16, heads=(8, 4), balanced=True, sinks=True, method="ulysses"),
    Case("strided({n},32)", F32, padding=True, method="ulysses"),
]


# Late inputs


@dataclass
class Late:
    """Inputs that arrive late on a stream of their own, and memory that is overwritten when it is free."""

    device: torch.device
    stream: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def copies(self, *tensors: Tensor) -> list[Tensor]:
        """Copies that are NaN until the work that is queued before them is done."""
        late = [torch.full_like(t, math.nan) for t in tensors]
        if self.stream is not None:
            gpu_sleep(2_000_000)  # clocks: about a millisecond
        for copied, t in zip(late, tensors, strict=True):
            copied.copy_(t)
        return late

    def overwrite(self) -> None:
        """Takes what was freed last, in pieces of several sizes, and fills it."""
        kept = [torch.full((1 << n,), math.nan, device=self.device) for n in range(12, 21)]
        del kept


# What is compared


class Faults(list[str]):
    """What is wrong in a case: all ranks go on, so that they stay in step."""

    def close(self, what: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape or got.dtype != want.dtype:
            self.append(f"{what}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}")
            return
        got, want = (torch.nan_to_num(t.detach().double(), nan=math.nan, neginf=-1.0) for t in (got, want))
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-3)) if want.numel() else 0.0
        if not error <= TOLERANCE.get(self.dtype, 0.0):
            self.append(f"{what}: error {error:.1e}")

    def equal(self, what: str, got: Tensor, want: Tensor) -> None:
        if not torch.equal(got, want):
            self.append(f"{what}: other bits in {int((got != want).sum())} of {want.numel()} elements")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The elements of each message that is received."""
    found: list[int] = []
    real = dist.batch_isend_irecv

    def batch(ops: list[Any]) -> Any:
        found.extend(op.tensor.numel() for op in ops if op.op is dist.irecv)
        return real(ops)

    dist.batch_isend_irecv = batch
    try:
        yield found
    finally:
        dist.batch_isend_irecv = real


def rows_of(ranges: dict[int, list[tuple[int, int]]]) -> int:
    return sum(last - first for found in ranges.values() for first, last in found)


@dataclass
class Problem:
    """One case's tensors, on every rank the same, and this rank's part of them."""

    case: Case
    options: Options
    rank: int
    world: int

    def __post_init__(self) -> None:
        n, device = self.options.length, torch.device(self.options.device)
        self.pattern = fw.Pattern.parse(self.case.text.replace("{n}", str(n)).replace("{far}", str(n // 2 + 188)))
        ends = [n * r // self.world for r in range(self.world + 1)]
        equal = tuple(itertools.pairwise(ends))
        balanced = fd.shard(self.pattern, self.world)
        self.shards = balanced if self.case.balanced else fd.Shards(self.pattern, equal, equal)
        self.rows = slice(*self.shards.ranges[self.rank])
        ranges = tuple(self.shards.ranges), tuple(self.shards.key_ranges)
        self.plan = plan_of((self.pattern,), *ranges, self.rank, False)
        heads, dtype = self.case.heads, self.case.dtype
        random = torch.Generator().manual_seed(7)
        shapes = [(BATCH, h, n, DEPTH) for h in (heads[0], heads[1], heads[1], heads[0])]
        self.q, self.k, self.v, self.d = (torch.randn(s, generator=random).to(device, dtype) for s in shapes)
        self.sinks = torch.randn(heads[0], generator=random).to(device, dtype) if self.case.sinks else None
        self.padding = (torch.rand(BATCH, n, generator=random) < 0.3).to(device) if self.case.padding else None

    def given(self, sinks: Tensor | None, padding: Tensor | None) -> dict[str, Any]:
        named = {"sinks": sinks, "key_padding_mask": padding}
        return {name: t for name, t in named.items() if t is not None}

    def whole(self) -> list[Tensor]:
        """The result of one process, its log-sum-exp and its gradients: this rank's rows, and all of the sinks'."""
        inputs = [t.clone().requires_grad_() for t in (self.q, self.k, self.v, self.sinks) if t is not None]
        o, lse = fw.attention(
            *inputs[:3], self.pattern, return_lse=True, **self.given(*inputs[3:] or [None], self.padding)
        )
        gradients = torch.autograd.grad(o, inputs, self.d)
        local = [t[:, :, self.rows] for t in (o, lse, *gradients[:3])]
        return [t.detach().clone() for t in (*local, *gradients[3:])]

    def over_ranks(self, late: Late) -> tuple[list[Tensor], tuple[int, int]]:
        """The same from all ranks together, and the elements that were received forward and backward."""
        parts = [t[:, :, self.rows] for t in (self.q, self.k, self.v)] + ([] if self.sinks is None else [self.sinks])
        padding = None if self.padding is None else self.padding[:, self.rows].clone()
        with late():
            inputs = [t.requires_grad_() for t in late.copies(*parts)]
            with counted() as forward:
                options = self.given(inputs[3] if self.sinks is not None else None, padding)
                more = {"return_lse": True, "method": self.case.method}
                o, lse = fd.attention(*inputs[:3], self.pattern, self.shards, **more, **options)
            late.overwrite()
            (d,) = late.copies(self.d[:, :, self.rows])
            with counted() as backward:
                gradients = list(torch.autograd.grad(o, inputs, d))
            late.overwrite()
            for shared in gradients[3:]:
                dist.all_reduce(shared)
        return [t.detach() for t in (o, lse, *gradients)], (sum(forward), sum(backward))

    @property
    def same_bits(self) -> bool:
        """Whether the result is promised to have the bits of one process."""
        in_one_piece = not any(step.merges for step in self.plan.steps)
        return not self.options.on_gpu and in_one_piece and self.rows.start % 128 == 0

    def expected_elements(self) -> tuple[int, int]:
        """What must be received: the needed keys and values, and their gradients from those who needed this rank's."""
        needed = rows_of(self.shards.needs(self.rank))
        others = [self.shards.needs(r).get(self.rank, []) for r in range(self.world)]
        given = rows_of(dict(enumerate(others)))
        width = 2 * BATCH * self.case.heads[1] * DEPTH
        again = needed if self.plan.fetches_again[self.rank] else 0
        return needed * (width + (BATCH if self.case.padding else 0)), (given + again) * width


def attention_case(case: Case, options: Options, rank: int, world: int) -> Faults:
    problem, faults = Problem(case, options, rank, world), Faults(case.dtype)
    want, late = problem.whole(), Late(torch.device(options.device))
    first: list[Tensor] = []
    for n in range(options.repeats):
        got, elements = problem.over_ranks(late)
        names = ("o", "lse", "dq", "dk", "dv", "dsinks")
        if case.method == "ranges" and elements != problem.expected_elements():
            faults.append(f"run {n}: received {elements} elements, expected {problem.expected_elements()}")
        for name, g, w in zip(names, got, want, strict=False):
            if n == 0:
                faults.close(name, g, w)
            else:
                faults.equal(f"{name} of run {n}", g, first[names.index(name)])
        first = first or got
    if problem.same_bits:
        faults.equal("o beside one process", first[0], want[0])
    return faults


# Layers


def made(kind: str, where: dict[str, Any]) -> nn.Module:
    if kind == "block":
        return fw.nn.BlockSparseLinear(512, 512, fw.BlockLayout((torch.rand(16, 16) < 0.3).int(), block=32), **where)
    if kind == "2:4":
        return fw.nn.SemiSparseLinear(512, 256, **where)
    return fw.nn.KSLinear([(1, 16, 32, 16), (16, 32, 16, 1)], **where)


def layer_case(kind: str, dtype: torch.dtype, options: Options, rank: int, world: int) -> Faults:
    """A layer cut along its output, and one along its input, against the whole one."""
    device, faults = torch.device(options.device), Faults(dtype)
    torch.manual_seed(11)
    full = made(kind, {"device": device, "dtype": dtype})
    mesh = init_device_mesh(options.device, (world,))
    for style in (fd.ColwiseParallel(), fd.RowwiseParallel()):
        column = isinstance(style, fd.ColwiseParallel)
        cut = parallelize_module(nn.ModuleDict({"a": copy.deepcopy(full)}), mesh, {"a": style})["a"]
        x = torch.randn(64, full.in_features, device=device, dtype=dtype).requires_grad_()
        d = torch.randn(64, full.out_features, device=device, dtype=dtype)
        want = full(x)
        (d_x,) = torch.autograd.grad(want, x, d)
        # What is whole on every rank where the layer is cut along its output (x) or along its input (the result).
        part_in = slice(None) if column else slice(*(full.in_features // world * (rank + n) for n in (0, 1)))
        part_out = slice(*(full.out_features // world * (rank + n) for n in (0, 1))) if column else slice(None)
        for n in range(options.repeats):
            got, g = layer_run(cut, x[:, part_in], d[:, part_out], Late(device))
            faults.close(f"{type(style).__name__}, run {n}", got, want[:, part_out])
            faults.close(f"{type(style).__name__}, dx of run {n}", g, d_x[:, part_in])
    return faults


def layer_run(cut: nn.Module, x: Tensor, d: Tensor, late: Late) -> tuple[Tensor, Tensor]:
    with late():
        (mine,) = late.copies(x.detach())
        got = cut(mine.requires_grad_())
        late.overwrite()
        (late_d,) = late.copies(d)
        (g,) = torch.autograd.grad(got, mine, late_d)
        late.overwrite()
    return got, g


def gather_case(options: Options, rank: int, world: int) -> Faults:
    """Cut and put together again, with parts of different sizes."""
    faults, late = Faults(F32), Late(torch.device(options.device))
    shards = fd.shard(fw.patterns.causal(options.length), world)
    x = torch.randn(3, options.length, 8, generator=torch.Generator().manual_seed(3)).to(options.device)
    for n in range(options.repeats):
        with late():
            (leaf,) = (t.requires_grad_() for t in late.copies(x))
            y = fd.gather(fd.scatter(leaf, shards, 1) * 2, shards, 1)
            (g,) = torch.autograd.grad(y, leaf, x)
        faults.equal(f"gathered of run {n}", y, 2 * x)
        faults.equal(f"gradient of run {n}", g, 2 * x)
    return faults


def every_case() -> list[tuple[str, Callable[[Options, int, int], Faults]]]:
    found: list[tuple[str, Callable[[Options, int, int], Faults]]] = []
    for case in CASES:
        found.append((case.name, lambda *a, case=case: attention_case(case, *a)))
    found.append(("scatter, gather", gather_case))
    for kind in ("block", "2:4", "Kronecker"):
        for dtype in (BF16, F32):
            name = f"{kind} layer, {str(dtype).removeprefix('torch.')}"
            found.append((name, lambda *a, kind=kind, dtype=dtype: layer_case(kind, dtype, *a)))
    return found


# Processes


def limit(options: Options) -> float:
    """Seconds after which everything is ended by force."""
    return max(MOST_SECONDS, 2 * options.seconds)


def environment(way: str, rank: int) -> dict[str, str]:
    """What NCCL must find in a rank's environment."""
    common = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    common |= {"NCCL_NET": "Socket", "NCCL_MAX_CTAS": "4", "NCCL_DEBUG": "WARN"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ways = {"flag": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "hosts": {"NCCL_HOSTID": f"rank{rank}"}}
    return common | ways.get(way, {})


def serve(rank: int, world: int, way: str, options: Options, store: str, until: float, pipe: Any) -> None:
    """A rank. Sends ("ready", …), then (case, faults, seconds) for each case; ("fatal", text) where it cannot go on."""
    faulthandler.dump_traceback_later(limit(options), exit=True)  # if nothing else ends this process
    os.environ.update(environment(way, rank))
    torch.set_num_threads(1)
    try:
        if options.on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            options.backend, init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=GROUP_SECONDS),
        )  # fmt: skip
        ones = torch.ones(1, device=options.device)
        dist.all_reduce(ones)
        if ones.item() != world:
            raise RuntimeError(f"all_reduce of {world} ones gave {ones.item()}")
        pipe.send(("ready", "", 0.0))
        for name, run in every_case():
            began = time.time()
            left = torch.tensor([until - began > 0.1 * options.seconds], dtype=F32, device=options.device)
            dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks run a case, or none
            if not left.item():
                pipe.send((name, None, 0.0))
                continue
            faults = run(options, rank, world)
            pipe.send((name, list(faults), time.time() - began))
        pipe.send(("done", "", 0.0))
    except BaseException:
        pipe.send(("fatal", traceback.format_exc(), 0.0))
    os._exit(0)  # a group whose peers are gone may not be destroyed in time


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    left_out: int = 0


class World:
    """The processes of some ranks, started, read and ended."""

    def __init__(self, world: int, way: str, options: Options, store: str, until: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.world, self.pipes, self.processes = world, [], []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, world, way, options, store, until, there)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def said(self, until: float) -> list[tuple[str, Any, float]] | str:
        """What all ranks say next, or why one does not."""
        answers: dict[int, tuple[str, Any, float]] = {}
        while len(answers) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(waiting, max(until - time.time(), 0.1))
            if not ready:
                return f"ranks {sorted(waiting.values())} hang"
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    return f"rank {rank} died"
                if answers[rank][0] == "fatal":
                    return f"rank {rank}: {answers[rank][1]}"
        return [answers[rank] for rank in range(self.world)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)


def shown(world: int, way: str, name: str, verdict: str, seconds: float) -> None:
    print(f"{world} ranks ({way})  {name:58} {verdict}  {seconds:.2f} s", flush=True)


def run_world(world: int, way: str, options: Options, until: float, tally: Tally) -> str | None:
    """All cases on some ranks. What is wrong if the group could not be made."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = World(world, way, options, f"{folder}/store", until)
        try:
            said = ranks.said(time.time() + (START_SECONDS if options.on_gpu else options.seconds))
            if isinstance(said, str):
                return said
            for name, _ in every_case():
                said = ranks.said(time.time() + GROUP_SECONDS + 5)
                if isinstance(said, str):
                    shown(world, way, name, "FAILED: " + said, 0.0)
                    tally.failed += 1
                    return None
                record(world, way, name, said, tally)
        finally:
            ranks.stop()
    return None


def record(world: int, way: str, name: str, said: list[tuple[str, Any, float]], tally: Tally) -> None:
    faults = [f"rank {rank}: {text}" for rank, (_, found, _) in enumerate(said) for text in found or []]
    seconds = max(seconds for _, _, seconds in said)
    if any(found is None for _, found, _ in said):
        tally.left_out += 1
        shown(world, way, name, "left out: no time", seconds)
    elif faults:
        tally.failed += 1
        shown(world, way, name, "FAILED: " + "; ".join(faults[:6]), seconds)
    else:
        tally.passed += 1
        shown(world, way, name, "passed", seconds)


def ways(options: Options) -> list[str]:
    """How several ranks may share the GPU, the most likely way first."""
    if options.backend != "nccl":
        return [options.backend]
    version = torch.cuda.nccl.version()
    print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, version))}, {torch.cuda.get_device_name()}", flush=True)
    return ["flag", "hosts"] if version >= (2, 30) else ["hosts", "flag"]


def guard(seconds: float) -> None:
    """Ends this process after so many seconds, and its children, which look after themselves too."""

    def end() -> None:
        print(f"nccl_check: not done after {seconds:.0f} s", flush=True)
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def parsed() -> tuple[Options, list[int]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks")
    parser.add_argument("--length", type=int, default=1024, help="of the sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=52, help="cases that would begin later are left out")
    given = parser.parse_args()
    options = Options(given.backend, given.device, given.length, given.repeats, given.seconds)
    return options, [int(w) for w in given.worlds.split(",")]


def main() -> int:
    options, worlds = parsed()
    guard(limit(options))
    began, tally = time.time(), Tally()
    if options.on_gpu and not torch.cuda.is_available():
        print("nccl_check: expected a CUDA device, got none")
        return 2
    possible = ways(options)
    for n, world in enumerate(worlds):
        until = began + options.seconds * (n + 1) / len(worlds)
        for way in list(possible):
            refused = run_world(world, way, options, until, tally)
            if refused is None:
                possible = [way]
                break
            lines = refused.strip().splitlines()
            print(f"{world} ranks ({way}): {options.backend} refuses: {' | '.join(lines[-4:])}", flush=True)
        else:
            print(f"{options.backend} takes no {world} ranks on this {options.device}, by any way", flush=True)
            tally.failed += 1
    if tally.left_out:
        print(f"{tally.left_out} left out for lack of time")
    print(f"{tally.passed} passed, {tally.failed} failed", flush=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
