"""The check of several NCCL ranks on one GPU, on two ranks of a CPU: its logic runs, and finds what is wrong."""

import subprocess
import sys
from pathlib import Path

import nccl_check
import pytest
import torch

PROGRAM = Path(__file__).with_name("nccl_check.py")


def test_runs_on_a_cpu():
    command = [sys.executable, str(PROGRAM), "--backend", "gloo", "--device", "cpu", "--worlds", "2"]
    done = subprocess.run(
        [*command, "--length", "512", "--repeats", "2", "--seconds", "150"], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert lines[-1] == f"{len(nccl_check.every_case())} passed, 0 failed"


@pytest.mark.parametrize("wrong", [float("nan"), 1e-3])
def test_finds_what_is_wrong(wrong):
    faults, want = nccl_check.Faults(torch.float32), torch.ones(3)
    faults.close("o", want.clone(), want)
    faults.equal("o", want.clone(), want)
    assert not faults
    got = want.clone()
    got[1] += wrong
    faults.close("o", got, want)
    faults.equal("o", got, want)
    faults.close("o", got[:2], want)
    assert len(faults) == 3 and "1 of 3" in faults[1]
