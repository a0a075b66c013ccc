"""The reduced set for compute-sanitizer covers what it says, runs, and stays small."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import gpu_small
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fretwork.patterns.block import block_layout


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fretwork":
            self.calls.append((function._opname, args))
        return function(*args, **(kwargs or {}))


def test_covers_everything_in_few_launches():
    with Recorder() as recorder:
        gpu_small.main("cpu")
    names, flags = ("sdd", "dsd", "dds"), (False, True)
    products = [(op, args) for op, args in recorder.calls if op in names]
    assert {(op, args[3], args[4]) for op, args in products} == set(itertools.product(names, flags, flags))
    kinds = {(op, args[0].dtype, args[5] if args[0].dtype == torch.float32 else None) for op, args in products}
    assert kinds == {(op, *kind) for op in names for kind in gpu_small.KINDS}
    assert {block_layout(args[2]).block for _, args in products} == set(gpu_small.BLOCKS)
    assert any(block_layout(args[2]).shape[2] > 1024 for _, args in products)
    softmax = [args for op, args in recorder.calls if op == "block_softmax"]
    assert {(args[6], args[7]) for args in softmax if args[4] is not None} == {("add", "mul"), ("mul", "add")}
    gradients = [args for op, args in recorder.calls if op == "block_softmax_backward"]
    assert {args[4] for args in gradients} == {"hmn", "n"}
    assert {args[0].dtype for args in gradients} == {torch.float16, torch.bfloat16, torch.float32}
    convolutions = [args for op, args in recorder.calls if op == "block_conv2d"]
    assert {args[0].dtype for args in convolutions} == {torch.float16, torch.bfloat16, torch.float32}
    assert {(args[0].dtype, args[-1]) for args in convolutions} >= {(torch.float16, False), (torch.bfloat16, True)}
    for op in ("block_conv2d_backward_x", "block_conv2d_backward_values"):
        assert sum(name == op for name, _ in recorder.calls) == len(convolutions)
    attention = [args for op, args in recorder.calls if op == "attention"]
    assert {args[0].dtype for args in attention} == {torch.float16, torch.bfloat16, torch.float32}
    assert {64, 128, 192, 256} <= {args[0].shape[-1] for args in attention}
    assert any("\n" in args[3] for args in attention) and any(args[0].shape[2] <= 16 for args in attention)
    sinks = [args for op, args in recorder.calls if op == "attention_backward" and args[20:] and args[21]]
    assert len(sinks) == len(gpu_small.SINKS)
    assert len({args[0].dtype for op, args in recorder.calls if op == "select_blocks"}) == 3
    assert sum(op == "attention_backward" for op, _ in recorder.calls) == len(gpu_small.ATTENTION) + 5 + len(sinks)
    # A split row is two launches, and so is softmax's gradient with that of rpe.
    split = sum(block_layout(args[2]).shape[2] > 1024 for _, args in products)
    two_four = [args for op, args in recorder.calls if op == "two_four_matmul"]
    assert {args[0].dtype for args in two_four} >= {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32}
    assert {args[5] for args in two_four} >= {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
    assert len(recorder.calls) + split + len(gradients) <= 500


@pytest.mark.skipif(shutil.which("compute-sanitizer", path="/usr/bin:/bin") is not None, reason="it is here")
def test_the_script_needs_compute_sanitizer():
    script = Path(__file__).parents[2] / "scripts/gpu_test"
    environment = {k: v for k, v in os.environ.items() if k != "FRETWORK_NO_SANITIZER"} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([script, "build", "python3"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "compute-sanitizer: expected in the path" in done.stdout
