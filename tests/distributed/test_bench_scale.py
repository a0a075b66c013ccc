"""The model of many GPUs: it sends what ranks need, its rounds are those of the exchange, and both commands run."""

import json
import sys

import numpy as np
import plot_families
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fretwork as fw
import fretwork.distributed as fd
import report_scale
import scale
import scale_model
from fretwork.distributed import _pieces, _steps
from scale_model import LATENCY, NVLINK, Costs, Messages, Ranks


def step_row(family, kind, nnz, ms):
    sizes = {"rows": 100, "keys": 100, "nnz": nnz}
    return {"part": "step", "family": family, "kind": kind, **sizes, "ms": {"forward": ms, "backward": 3 * ms}}


def costs():
    rows = [step_row(f, k, n, n / 1e6) for f in scale_model.FAMILIES for k in ("own", "far") for n in (1000, 100_000)]
    rows += [
        {"part": "row", "rows": 1000, "ms": {"merge": 1.0, "sum": 2.0}},
        {"part": "copy", "gb_per_s": 4000.0},
        {"part": "host", "us": {"forward": 0.0, "backward": 0.0}},
    ]
    return Costs([{"heads": 16, "depth": 128, **r} for r in rows])


def test_times_between_and_beyond_the_measured_ones():
    kernels, sizes = costs().kernels, np.array([5, 10_000, 10**9])
    assert kernels("causal", "own", sizes, "forward") == pytest.approx([0.001, 0.01, 1000])
    assert kernels("causal", "own", sizes, "backward") == pytest.approx([0.003, 0.03, 3000])
    assert kernels("causal", "row", sizes, "forward")[0] == pytest.approx(0.001)  # never measured: like its own keys


@pytest.mark.parametrize("family", scale_model.FAMILIES)
def test_what_travels_is_what_is_needed(family, monkeypatch, tmp_path):
    monkeypatch.setattr(scale_model, "KEPT", tmp_path)
    ranks, shards = scale_model.ranks_of(family, 8192, 16, costs()), scale_model.shards_of(family, 8192, 16)
    for rank in range(16):
        plan = scale_model.rank_plan(family, 8192, 16, rank)
        for peer in range(16):
            needed = sum(b - a for a, b in shards.needs(rank).get(peer, []))
            assert ranks.received[rank, (rank - peer) % 16] == needed == ranks.sent[peer, (rank - peer) % 16]
        assert ranks.again[rank] == plan.fetches_again[rank]
        steps = scale_model.as_steps(np.array(scale_model.steps_of(rank, 16, plan.steps)))
        for all_work, work in zip(
            (ranks.forward, ranks.backward), costs().steps(family, steps, ranks.rows), strict=True
        ):
            assert all_work[rank].sum() == pytest.approx(work.sum())


def ring(world, sent, work, own=None, room=0.0):
    """Ranks that each send the same to all others, and work for some time on their own keys and on what each sends."""
    square = np.full((world, world), float(sent))
    square[:, 0] = 0
    works = np.full((world, world), float(work))
    own = np.full(world, work if own is None else own)
    return scale_model.pipeline(np.zeros(world), own, works, Messages(square, 0 * square, 0.0, room))


def test_rounds():
    """Hidden transfers cost nothing, hidden work costs the transfers; the second round waits for the own work, unless
    there is room for it."""
    travel = LATENCY + 1e6 / NVLINK
    assert ring(4, 1e6, 10.0) == pytest.approx(40.0)
    assert ring(4, 1e6, 0.0) == pytest.approx(3 * travel)
    assert ring(2, 370e6, 0.4) == pytest.approx(1 + LATENCY + 0.4)
    assert ring(3, 370e6, 0.4) == pytest.approx(2 * (1 + LATENCY) + 0.4)
    assert ring(3, 370e6, 1.5) == pytest.approx(4.5)
    assert ring(4, 370e6, 0.0, own=5.0) == pytest.approx(5 + 2 * (1 + LATENCY))
    assert ring(4, 370e6, 0.0, own=5.0, room=3 * 370e6) == pytest.approx(5)
    assert ring(16, 48e6, 0.0).max() == pytest.approx(15 * (1 + LATENCY))  # ranks at a node's border: InfiniBand


def test_a_late_rank_keeps_others_waiting():
    sent = np.array([[0, 0.0], [0, 370e6]])
    ends = scale_model.pipeline(np.array([0.0, 5.0]), np.zeros(2), 0 * sent, Messages(sent, 0 * sent, 0.0, 0.0))
    assert ends == pytest.approx(6 + LATENCY)


def test_backward_returns_what_came():
    """One rank needs the other's keys; it was not kept, so it comes again, and its gradient goes back."""
    received, work = np.array([[0, 0], [0, 1000.0]]), np.array([[1.0, 0], [1.0, 1.0]])
    of, each = costs(), 1000 * 16 * 128 * 2 * 2 / NVLINK + LATENCY
    for again in (False, True):
        ranks = Ranks(received, work, work, np.array([False, again]), np.array([10.0, 10.0]))
        ends = scale_model.backward_ends(ranks, of)
        packed, adds = 1000 * of.key_bytes * 2 * of.copy, 1000 * 2 * of.sum
        tail = (2 if again else 1) + each + packed
        assert ends[0] == pytest.approx(tail + adds)


def test_both_commands(monkeypatch, tmp_path):
    rows, modelled = tmp_path / "scale.json", tmp_path / "model.json"
    monkeypatch.setattr(scale, "SIZES", scale.SIZES[4:5])
    monkeypatch.setattr(scale, "SEQUENCES", [("causal", 1 << 16, 8, 7)])
    monkeypatch.setattr(scale, "LARGE", [])
    monkeypatch.setattr(scale_model, "KEPT", tmp_path)
    monkeypatch.setattr(scale_model, "FAMILIES", {"causal": scale_model.FAMILIES["causal"]})
    threads = torch.get_num_threads()
    measure = ["measure", "--device", "cpu", "--small", "--out", str(rows)]
    monkeypatch.setattr(sys, "argv", ["scale.py", *measure])
    scale.main()
    torch.set_num_threads(threads)
    parts = [r["part"] for r in json.loads(rows.read_text())]
    assert set(parts) == {"step", "row", "copy", "host", "rank"}
    model = ["model", "--rows", str(rows), "--out", str(modelled), "--tokens", "4096", "--worlds", "8,16"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *model])
    scale.main()
    found = json.loads(modelled.read_text())
    assert [(r["part"], r["world"]) for r in found] == [("check", 8), ("model", 8), ("model", 16)]
    assert all(r["efficiency"] > 0 and r["ms"]["forward"] > 0 for r in found[1:])


def test_stops_in_time(monkeypatch, tmp_path, capsys):
    options = ["--device", "cpu", "--small", "--seconds", "0", "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["scale.py", "measure", *options])
    scale.main()
    assert "out of time: " in capsys.readouterr().out


def modelled(family, tokens, world, fits=True):
    ms = {"forward": 1.25, "backward": 250.0, "ideal": 100.0, "all_gather": 300.0, "ring": 4000.0}
    facts = {"device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-19", "heads": 16, "depth": 128, "dtype": "bf16"}
    sizes = {"compute_ms": 200.0, "received_gb": 0.5, "sent_gb": 2.25, "efficiency": 0.398}
    fit = dict.fromkeys(("ours", "all_gather", "ring"), True) | {"all_gather": fits}
    return {
        **facts,
        "part": "model",
        "family": family,
        "tokens": tokens,
        "world": world,
        "ms": ms,
        "fits": fit,
        **sizes,
    }


def test_page():
    rows = [modelled("window", n, w, fits=n < 1 << 20) for n in (1 << 17, 1 << 20) for w in (8, 16, 64)]
    check = {"part": "check", "family": "causal", "tokens": 1 << 17, "world": 8, "rank": 7, "steps": 8}
    check |= {"measured": {"forward": 2.0, "backward": 5.0}, "predicted": {"forward": 2.1, "backward": 4.0}}
    lines = report_scale.scale_section([*rows, check])
    assert "| 131,072 | 8 | **251** | 1.25 | 250 | 0.4 | 0.5 | 2.25 | 300 | 4,000 |" in lines
    assert "| 1,048,576 | 64 | **251** | 1.25 | 250 | 0.4 | 0.5 | 2.25 | – | 4,000 |" in lines
    assert "| causal | 131,072 | 8 | 7 | 8 | 2 | 2.1 | 1.05 | 5 | 4 | 0.80 |" in lines
    assert not any("| 16 |" in line for line in lines)


def test_picture():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = [modelled(f, n, w) for f in scale_model.FAMILIES for n in (1 << 17, 1 << 20) for w in (8, 64)]
    figure = plot_families.scale(pyplot, rows)
    assert [axis.get_title() for axis in figure.axes[:5]] == list(scale_model.FAMILIES)
    pyplot.close(figure)


CAUSAL, MOST = fw.patterns.causal(1024), fw.patterns.fixed(1024, 128, 96)


@pytest.mark.parametrize(
    ("pattern", "ahead", "sizes", "expected"),
    [
        # One round before the rank's own keys, two behind them.
        (CAUSAL, 0, [1] * 5, "post step post post step post step post step step step"),
        (CAUSAL, 4, [1] * 5, "post post post post step step post step step step step"),
        (CAUSAL, 8, [1] * 5, "post post post post post step step step step step step"),
        # Three quarters of keys arrive, and copies of as many leave to the two ranks behind.
        (MOST, 3, [1.5, 1.5, 0.75, 0.75, 0.75], "post post step post step post step post step step step"),
    ],
)
def test_rounds_are_those_of_the_exchange(pattern, ahead, sizes, expected, monkeypatch):
    """When the five rounds of rank 5 are posted, among the steps on its own keys and on those of five peers."""
    monkeypatch.setattr(_steps, "_AHEAD", ahead)
    _steps.plan_of.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        said = []
        real = _pieces.attention_op
        monkeypatch.setattr(_pieces, "attention_op", lambda *a: (said.append("step"), real(*a))[1])
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: said.append("post") or [])
        q, k, v = torch.randn(3, 1, 1, 128, 16)
        fd.attention(q, k, v, pattern, method="ranges")
    finally:
        dist.destroy_process_group()
        _steps.plan_of.cache_clear()
    assert " ".join(said) == expected
    rounds = []
    for n, (at, size) in enumerate(zip((at for at, word in enumerate(said) if word == "post"), sizes, strict=True)):
        assert scale_model.posted_at(rounds, size, ahead, begin=0.0, own_done=1.0) == said[:at].count("step")
        rounds.append(scale_model.Coming(size, done=n + 2.0))
