"""How the package and its benchmarks time calls."""

import time
from types import SimpleNamespace

import torch

from fretwork import _timing


def test_a_late_host_is_not_timed(monkeypatch):
    """A time counts if the GPU was still busy when everything had been issued; else it is taken again, some times."""

    class Event:
        times = iter([300.0, 200.0])

        def record(self):
            done.append("record")

        def query(self):
            return late.pop(0) if late else True

        def elapsed_time(self, end):
            return next(self.times)

    done, late = [], [True, False]
    flush = SimpleNamespace(zero_=lambda: done.append("flush"))
    monkeypatch.setattr(_timing.torch, "empty", lambda *size, **kind: flush)
    monkeypatch.setattr(_timing.torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(_timing.torch.cuda, "_sleep", lambda clocks: done.append(clocks))
    monkeypatch.setattr(_timing.torch.cuda, "synchronize", lambda: done.append("wait"))
    turn = _timing._gpu_timer()
    assert turn(lambda: done.append("call")) == [300.0]
    issued = ["flush", "record", "call", "record", "wait"]
    assert done[1:6] == done[7:] == issued and 0 < done[0] < done[6]  # twice, with more time
    done.clear()
    assert turn(lambda: None) == [200.0] and done.count("flush") == 3  # a call that waits for the GPU is timed with it


def test_peers_take_turns_in_changing_orders(monkeypatch):
    done = []
    monkeypatch.setattr(_timing, "_cpu_turn", lambda call: [call()])
    names = ("kernel", "bmm", "dense")
    calls = {name: lambda name=name: done.append(name) or 1.0 for name in names}
    assert _timing.medians(calls, torch.device("cpu"), rounds=8) == dict.fromkeys(names, 1.0)
    rounds = [tuple(done[n : n + 3]) for n in range(6, len(done), 3)]
    assert len(rounds) == 8 and all(set(r) == set(names) for r in rounds)
    assert len({r[0] for r in rounds}) == 3 and len({r[1] for r in rounds}) == 3


def test_medians_find_the_slower_call():
    times = _timing.medians(
        {"slow": lambda: time.sleep(0.004), "quick": lambda: time.sleep(0.001)}, torch.device("cpu"), seconds=0.2
    )
    assert 1 <= times["quick"] < times["slow"] and times["slow"] >= 4  # a busy machine may wake later
