"""Thousands of random problems against float64 on the device itself: the loop that every soak runs.

A soak draws a problem from (number, seed) and runs it, which gives for each result, by name, by how much its worst
element is beyond what rounding explains: above 1 is wrong. The figures stay on the device and are looked at once per
few hundred problems, so that nothing waits for the GPU. The seed of the run and the number of a problem repeat it:
--seed S --only N.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Draw = Callable[[int, int], Any]
Run = Callable[[Any, int, torch.device], dict[str, Tensor]]


def soak(draw: Draw, run: Run, count: int, seed: int, device: torch.device, seconds: float = 0.0) -> int:
    """Problems done; AssertionError names those that are wrong."""
    began, done = time.perf_counter(), 0
    pending: list[tuple[Any, dict[str, Tensor]]] = []
    for number in range(count):
        problem = draw(number, seed)
        pending.append((problem, run(problem, seed, device)))
        done += 1
        if len(pending) == 400 or number == count - 1:
            check(pending, seed)
            pending = []
            print(f"\r{done} of {count}, {time.perf_counter() - began:.0f} s", end="", file=sys.stderr, flush=True)
            if seconds and time.perf_counter() - began > seconds:
                break
    print(file=sys.stderr)
    return done


def check(pending: list[tuple[Any, dict[str, Tensor]]], seed: int) -> None:
    parts = [(problem, name) for problem, results in pending for name in results]
    beyond = torch.stack([e for _, results in pending for e in results.values()]).cpu()
    wrong = [f"{parts[n][0]}: {parts[n][1]} by {beyond[n]:.3g}" for n in (beyond > 1).nonzero().flatten().tolist()]
    assert not wrong, f"seed {seed}: {len(wrong)} wrong, among them\n" + "\n".join(wrong[:5])


def main(doc: str, draw: Draw, run: Run) -> None:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--only", type=int, help="this problem of the seed alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after as many, if not 0")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"seed {options.seed}")
    if options.only is not None:
        problem = draw(options.only, options.seed)
        print(problem, "excess", {name: float(e) for name, e in run(problem, options.seed, device).items()})
        return
    began = time.perf_counter()
    done = soak(draw, run, options.count, options.seed, device, options.seconds)
    print(f"{done} problems agree with float64, {time.perf_counter() - began:.0f} s")
    if done < options.count:
        sys.exit(f"only {done} of {options.count} in {options.seconds:.0f} s")
