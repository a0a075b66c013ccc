"""Many ranks of a CPU: shards, attention with every option, ranks that disagree or die; all against one process."""

import datetime
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from ranks import on_ranks  # noqa: F401 (a fixture)
from torch.testing._internal.distributed.fake_pg import FakeStore

import fretwork as fw
import fretwork.distributed as fd

P = fw.patterns
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


# Shards


def test_shards_are_values():
    shards = fd.shard(P.longformer(512, 10, [0, 300]), 4, align=16)
    assert pickle.loads(pickle.dumps(shards)) == shards and hash(shards) == hash(fd.shard(shards.pattern, 4, 16))
    assert shards != fd.shard(shards.pattern, 4, 32) and shards.key_ranges == shards.ranges
    with pytest.raises(ValueError, match=r"shards: rank: expected 0 to 3, got 4"):
        shards.needs(4)
    with pytest.raises(TypeError, match=r"shards: rank: expected an int, got 1.5"):
        shards.nnz(1.5)


def test_shards_of_other_families():
    """Elements, not blocks; keys of patterns that are not square are cut into equal parts."""
    layout = fw.BlockLayout((torch.rand(6, 9) < 0.5).int(), block=16)
    kronecker = fw.KroneckerPattern(2, 3, 4, 5)
    for pattern in (layout, kronecker, P.causal((40, 100))):
        mask = pattern.mask().reshape(pattern.shape[-2:])
        shards = fd.shard(pattern, 3, align=5)
        assert shards.key_ranges[-1][1] == mask.shape[1]
        for rank, (first, last) in enumerate(shards.ranges):
            assert shards.nnz(rank) == mask[first:last].sum()
            needed = mask[first:last].any(0)
            needed[slice(*shards.key_ranges[rank])] = False
            found = [j for ranges in shards.needs(rank).values() for r in ranges for j in range(*r)]
            assert sorted(found) == needed.nonzero().flatten().tolist()


# Attention against one process


def whole(size, heads, dims, dtype, keys=None, batch=2):
    shapes = [(heads[0], size, dims[0]), (heads[1], keys or size, dims[0]), (heads[1], keys or size, dims[1])]
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(rank, patterns, shards, options, dtype=F64, heads=(4, 2), dims=(8, 12), local=None, learns=(), keys=None):
    """Rows of the result and all gradients are those of one process; `local` names options that are cut."""
    first_pattern = patterns if isinstance(patterns, fw.Pattern) else patterns[0]
    first_pattern = first_pattern if isinstance(first_pattern, fw.Pattern) else first_pattern[0]
    size, length = first_pattern.shape[-2:]
    world = dist.get_world_size()
    rows, columns = (
        (shards.ranges[rank], shards.key_ranges[rank])
        if shards
        else tuple((n * rank // world, n * (rank + 1) // world) for n in (size, length))
    )
    q, k, v = whole(size, heads, dims, dtype, length)
    parts = [t.detach()[:, :, slice(*r)].clone().requires_grad_() for t, r in ((q, rows), (k, columns), (v, columns))]
    mine = dict(options)
    for name, (dim, r) in (local or {}).items():
        cut = rows if r == "rows" else columns
        mine[name] = options[name].detach().narrow(dim, cut[0], cut[1] - cut[0]).clone()
        mine[name].requires_grad_(options[name].requires_grad)
    for name in learns:
        if name not in (local or {}):
            mine[name] = options[name].detach().clone().requires_grad_()
    o, lse = fd.attention(*parts, patterns, shards, return_lse=True, **mine)
    want, want_lse = fw.attention(q, k, v, patterns, return_lse=True, **options)
    assert_close(o, want[:, :, slice(*rows)], dtype)
    assert_close(torch.nan_to_num(lse, neginf=-1), torch.nan_to_num(want_lse[:, :, slice(*rows)], neginf=-1), dtype)
    d, d_lse = torch.randn_like(want), torch.randn_like(want_lse).masked_fill(want_lse == -torch.inf, 0)
    given = torch.autograd.grad([want, want_lse], [q, k, v, *(options[n] for n in learns)], [d, d_lse])
    d, d_lse = d[:, :, slice(*rows)], d_lse[:, :, slice(*rows)]
    got = torch.autograd.grad([o, lse], [*parts, *(mine[n] for n in learns)], [d, d_lse])
    for g, e, r in zip(got, given, (rows, columns, columns), strict=False):
        assert_close(g, e[:, :, slice(*r)], dtype)
    for name, g, e in zip(learns, got[3:], given[3:], strict=True):
        if name in (local or {}):
            assert_close(g, e.narrow(local[name][0], rows[0], rows[1] - rows[0]), dtype)
        else:
            dist.all_reduce(g)
            assert_close(g, e, dtype)


PATTERNS = [
    "strided(150,11)",
    "sliding_window(150,9,9)",
    "longformer(150,5,(0,70,149))",
    "causal(150)",
    "sinks(150,3,20)",
]


def every_option(rank, world):
    for text in PATTERNS:
        pattern = fw.Pattern.parse(text)
        for shards in (None, fd.shard(pattern, world, align=8), fd.shard(pattern, world, align=100)):
            padding = torch.rand(2, 150) < 0.3
            check(rank, pattern, shards, dict(key_padding_mask=padding), local=dict(key_padding_mask=(1, "keys")))
            if shards is None:
                check(rank, pattern, shards, dict(key_padding_mask=padding, scale=0.3, softcap=3.0))
            check(rank, pattern, shards, dict(sinks=torch.randn(4, dtype=F64, requires_grad=True)), learns=["sinks"])
            check(rank, pattern, shards, dict(bias=fw.alibi(torch.rand(4, dtype=F64))))
            row = torch.randn(1, 4, 150, 1, dtype=F64, requires_grad=True)
            check(rank, pattern, shards, dict(bias=row), local=dict(bias=(2, "rows")), learns=["bias"])
            column = torch.randn(1, 150, dtype=F64, requires_grad=True)
            check(rank, pattern, shards, dict(bias=column), learns=["bias"])


@pytest.mark.parametrize("world", [2, 3])
def test_every_option(on_ranks, world):
    on_ranks(world, every_option)


def every_kind_of_pattern(rank, world):
    several = [fw.Pattern.parse(text) for text in PATTERNS[:4]]
    check(rank, several, None, {})
    check(rank, several, None, dict(bias=fw.alibi(torch.rand(4, dtype=F64))))
    check(rank, [several, [several[2]]], None, {})
    check(rank, P.causal((60, 150)), None, {})
    check(
        rank,
        P.causal((60, 150)),
        fd.shard(P.causal((60, 150)), world, 8),
        dict(bias=fw.alibi(torch.rand(4, dtype=F64))),
    )
    check(rank, P.causal((60, 150)), fd.shard(P.causal((60, 150)), world, 64), {})  # keys without rows
    whole_mask = dict(key_padding_mask=torch.rand(2, 60) < 0.3)  # one rank holds all keys: its mask is whole, too
    check(rank, P.causal(60), fd.shard(P.causal(60), world, 128), whole_mask)
    empty_row = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]
    check(rank, fw.BlockLayout(empty_row, block=16), None, {})
    check(rank, P.fixed(1024, 32, 2), None, {}, heads=(1, 1))  # many ranges from each rank
    check(rank, fw.BlockLayout((torch.rand(5, 5) < 0.5).int(), block=16), None, {})
    check(rank, P.place(P.full(0), (90, 90)), None, {})
    check(rank, P.strided(96, 8), None, {}, dtype=F32, heads=(6, 3))


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_of_pattern(on_ranks, world):
    on_ranks(world, every_kind_of_pattern)


def halo(rank, world):
    """Each row of a window has its keys in one piece: all bits are those of one process, and gradients repeat."""
    for pattern, dtype in (
        (P.sliding_window(1024, 100, 0), F32),
        (P.sliding_window(1024, 60, 60), F32),
        (P.causal(1024), BF16),
    ):
        q, k, v = (t.detach() for t in whole(1024, (2, 1), (32, 32), dtype))
        rows = slice(rank * 1024 // world, (rank + 1) * 1024 // world)
        parts = [t[:, :, rows].clone().requires_grad_() for t in (q, k, v)]
        o = fd.attention(*parts, pattern)
        if pattern != P.causal(1024):
            assert torch.equal(o, fw.attention(q, k, v, pattern)[:, :, rows])
        d = torch.randn_like(o)
        first = torch.autograd.grad(o, parts, d)
        again = torch.autograd.grad(fd.attention(*parts, pattern), parts, d)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_halo(on_ranks):
    on_ranks(4, halo)


def no_batch(rank, world):
    for method in ("ranges", "ulysses"):
        q, k, v = (torch.randn(0, 2, 32, 16, requires_grad=True) for _ in range(3))
        o = fd.attention(q, k, v, P.causal(32 * world), method=method)
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert o.shape == q.shape and all(g.shape == q.shape for g in gradients)


def test_no_batch(on_ranks):
    on_ranks(2, no_batch)


@pytest.fixture
def messages(monkeypatch):
    """What one of 8 ranks would send, forward and backward."""

    def run(rank, pattern, heads, **options):
        said = []
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: said.extend(ops) or [])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            q, k, v = (torch.randn(1, 128, heads, 16).transpose(1, 2).requires_grad_() for _ in range(3))
            o = fd.attention(q, k, v, pattern, method="ranges", **options)
            forward = len(said)
            o.sum().backward()
        finally:
            dist.destroy_process_group()
        return [[op.tensor for op in part if op.op is dist.isend] for part in (said[:forward], said[forward:])]

    return run


def test_keys_are_copied_once(messages):
    """Keys that do not lie one after another go to seven ranks at once."""
    forward, _ = messages(0, P.causal(1024), 2)
    assert len(forward) == 2 * 7 and len({t.data_ptr() for t in forward}) == 2


def test_gradients_on_their_way_take_no_more_memory(messages):
    """Slopes ask for pieces that reach to the end of the rows."""
    _, backward = messages(7, P.causal(1024), 1, bias=fw.alibi(torch.ones(1)))
    assert len(backward) == 2 * 7
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in backward)


def in_autocast(rank, world):
    q, k, v = (t.detach()[:, :, rank * 48 : rank * 48 + 48] for t in whole(96, (2, 2), (16, 16), F32))
    with torch.autocast("cpu", BF16):
        o = fd.attention(q, k, v, P.causal(96))
    assert o.dtype == BF16 and torch.equal(o, fd.attention(*(t.bfloat16() for t in (q, k, v)), P.causal(96)))
    leaf = q.clone().requires_grad_()
    (d,) = torch.autograd.grad(fd.attention(leaf, k, v, P.causal(96)).square().sum(), leaf)
    assert d.shape == leaf.shape
    with pytest.raises((NotImplementedError, RuntimeError)):
        o = fd.attention(leaf, k, v, P.causal(96)).square().sum()
        torch.autograd.grad(o, leaf, create_graph=True)


def test_autocast_and_second_derivatives(on_ranks):
    on_ranks(2, in_autocast)


# Ranks that disagree, and ranks that die

LATE = r"attention: group: expected every rank to make the same call within the group's timeout, got "


def disagree(rank, world, what):
    pattern = P.sliding_window(64, 40, 0) if what == "pattern" and rank else P.causal(64)
    ends = ((0, 20), (20, 64)) if what == "shards" and rank else ((0, 32), (32, 64))
    rows, other = ends[rank][1] - ends[rank][0], bool(rank)
    heads = 3 if what == "q" and other else 2
    key_heads = 1 if what == "k" and other else heads
    shapes = [(2, heads, rows, 16), (2, key_heads, rows, 16), (2, key_heads, rows, 8 if what == "v" and other else 16)]
    options = {what: 0.5} if what in ("scale", "softcap") and rank else {}
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=f"attention: {what}: expected the same on every rank of the group, got .* on"
    ):
        fd.attention(*map(torch.randn, shapes), pattern, fd.Shards(pattern, ends, ends), **options)
    assert time.monotonic() - began < 10
    fd.attention(*torch.randn(3, 2, 2, 32, 16), P.causal(64))  # the group still works


def take_turns(rank, world):
    """Calls that ranks have agreed on, but not in this order."""
    q, k, v = torch.randn(3, 2, 2, 32, 16)
    patterns, group = (P.sliding_window(64, 10, 0), P.causal(64)), dist.new_group(timeout=datetime.timedelta(seconds=3))
    for pattern in patterns:
        fd.attention(q, k, v, pattern, None, group)
    with pytest.raises(RuntimeError, match=LATE):
        fd.attention(q, k, v, patterns[rank], None, group)
    dist.barrier()


def test_disagreement_on_known_calls(on_ranks):
    on_ranks(2, take_turns)


def gathers_other_sizes(rank, world):
    shards = fd.shard(P.causal(64), world, 16)
    rows = shards.ranges[rank][1] - shards.ranges[rank][0]
    for local in (torch.randn(rows, 3 + rank), torch.randn(rows, 3).to((F32, F64)[rank])):
        with pytest.raises(
            RuntimeError, match=r"gather: local: expected the same on every rank of the group, got .* on"
        ):
            fd.gather(local, shards, 0)
    for dtype in (torch.bool, torch.float8_e4m3fn):
        x = torch.full((64, 3), rank).to(dtype)
        whole = fd.gather(fd.scatter(x, shards, 0), shards, 0)
        assert whole.dtype == dtype and torch.equal(
            whole.float()[:, 0],
            torch.arange(2.0).repeat_interleave(torch.tensor([last - first for first, last in shards.ranges])),
        )


def test_gather_of_other_sizes(on_ranks):
    on_ranks(2, gathers_other_sizes)


@pytest.mark.parametrize("what", ["pattern", "q", "k", "v", "scale", "softcap", "shards"])
def test_disagreement(on_ranks, what):
    on_ranks(2, disagree, what)


def die(rank, world, method, where):
    q, k, v = (torch.randn(2, 2, 32, 16, requires_grad=True) for _ in range(3))
    o = fd.attention(q, k, v, P.full(64), method=method)
    dist.barrier()
    if rank:
        os._exit(1)
    with pytest.raises(RuntimeError, match=LATE):
        if where == "backward":
            o.sum().backward()
        fd.attention(q, k, v, P.full(64) if where == "forward" else P.causal(64), method=method)


def stay_away(rank, world, method, where):
    """A rank that lives and does not come."""
    q, k, v = (torch.randn(2, 2, 32, 16, requires_grad=True) for _ in range(3))
    o = fd.attention(q, k, v, P.full(64), method=method)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
    if rank:
        time.sleep(2)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=LATE):
        if where == "backward":
            o.sum().backward()
        fd.attention(q, k, v, P.full(64) if where == "forward" else P.causal(64), method=method)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("where", ["agreement", "forward", "backward"])
@pytest.mark.parametrize("method", ["ranges", "ulysses"])
def test_death(on_ranks, method, where):
    on_ranks(2, die, method, where, dies=[1])


@pytest.mark.parametrize("where", ["agreement", "forward", "backward"])
@pytest.mark.parametrize("method", ["ranges", "ulysses"])
def test_absence(on_ranks, method, where):
    on_ranks(2, stay_away, method, where)


def test_example():
    """torchrun sets what the example asks for."""
    program = [str(Path(__file__).resolve().parents[2] / "examples/long_context.py"), "--steps", "2", "--length", "256"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert all(len(line) == 3 and abs(float(line[1]) - float(line[2])) < 1e-3 for line in lines)


# What is refused


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(dropout_p=0.1), "attention: dropout_p: expected 0 on several ranks, got 0.1"),
        (dict(blocks=torch.ones(1, 1, 1, 1).bool()), "attention: blocks: expected None on several ranks, got Tensor"),
        (dict(shards="x"), "attention: shards: expected what fd.shard returns, got str"),
        (
            dict(pattern=None),
            "attention: pattern: expected a fretwork.Pattern, or shards that say the lengths, got None",
        ),
        (
            dict(q=torch.zeros(2, 2, 63, 8)),
            "attention: q: expected 64 rows, this rank's part [0, 64) of 64, got 63 in ",
        ),
        (dict(q=torch.zeros(2, 64, 8)), "attention: q: expected 4 dimensions (B, Hq, rows, D), got (2, 64, 8)"),
        (dict(k=torch.zeros(2, 2, 64, 9)), "attention: k: expected "),
        (dict(bias=torch.zeros(63, 64)), "attention: bias: expected 64 rows, this rank's, or 1, got 63 in (63, 64)"),
        (
            dict(bias=torch.zeros(64, 63)),
            "attention: bias: expected a shape that broadcasts to (2, 2, 64, 64), got (64, 63)",
        ),
        (
            dict(key_padding_mask=torch.zeros(2, 63).bool()),
            "attention: key_padding_mask: expected 64 keys, this rank's, or all",
        ),
        (
            dict(key_padding_mask=torch.zeros(2, 64)),
            "attention: key_padding_mask: expected bool, True where a key is padding, got float32",
        ),
        (dict(sinks=torch.zeros(3)), "attention: sinks: expected shape (2,), got (3,)"),
        (
            dict(pattern=[P.causal(64), P.causal(63)]),
            "attention: pattern[1]: expected shape (64, 64) like the first, got ",
        ),
        (dict(group=5), "attention: group: expected a process group that this rank is in, got int"),
        (dict(softcap=-1.0), "attention: softcap: expected 0 (none) or a positive number, got -1.0"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_refuses(alone, bad, text):
    call = dict(zip("qkv", torch.zeros(3, 2, 2, 64, 8), strict=True), pattern=P.causal(64)) | bad
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)) as error:
        fd.attention(**call)
    assert str(error.value).startswith(text)


def test_without_a_group():
    with pytest.raises(RuntimeError, match=r"attention: group: expected torch.distributed to be initialised"):
        fd.attention(*torch.zeros(3, 2, 2, 64, 8), P.causal(64))


def test_shards_say_the_lengths(alone):
    q, k, v = torch.randn(3, 2, 2, 64, 8)
    assert torch.equal(fd.attention(q, k, v, shards=fd.shard(P.causal(64), 1)), fw.attention(q, k, v))
