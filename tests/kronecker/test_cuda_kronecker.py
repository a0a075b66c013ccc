"""What only a GPU can show of the Kronecker products: repeated launches, graphs, and how many kernels a layer needs."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fretwork as fw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
both_layouts = pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])
# Patterns, batches and types that together reach every kind of kernel.
CASES = [
    ((6, 64, 64, 1), 1000, torch.float16, None),
    ((4, 64, 64, 4), 1000, torch.float16, None),
    ((1, 96, 48, 16), 777, torch.bfloat16, None),
    ((1, 256, 256, 16), 2048, torch.float16, None),
    ((2, 48, 40, 2), 500, torch.float32, "tf32"),
    ((2, 48, 40, 4), 300, torch.float32, "ieee"),
    ((1, 33, 17, 5), 196, torch.float16, None),
    ((2, 64, 96, 4), 196, torch.float16, None),
    ((2, 512, 512, 4), 196, torch.float16, None),
    ((1, 512, 512, 4), 196, torch.float16, None),
    ((64, 64, 64, 1), 196, torch.bfloat16, None),
    ((6, 64, 64, 1), 1001, torch.float16, None),
    ((4, 64, 64, 4), 1001, torch.bfloat16, None),
    ((1, 256, 256, 16), 2047, torch.float16, None),
    ((2, 48, 40, 2), 501, torch.float32, "tf32"),
    ((2, 64, 96, 4), 16, torch.float16, None),
    ((1, 256, 512, 4), 16, torch.float16, None),
    ((2, 64, 96, 4), 400, torch.float16, None),
    ((1, 128, 128, 16), 1, torch.bfloat16, None),
    ((3, 40, 24, 1), 7, torch.float32, "ieee"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}-{c[3]}")


def operands(case, bs_last):
    (a, b, c, d), batch, dtype, _ = case
    x = torch.randn((a * c * d, batch) if bs_last else (batch, a * c * d), device="cuda").to(dtype)
    w = (torch.randn(a, b, c, d, device="cuda") / c**0.5).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), torch.randn(a * b * d, device="cuda").to(dtype).requires_grad_()


@each_case
@both_layouts
def test_a_thousand_launches_agree_bit_for_bit(case, bs_last):
    x, w, bias = operands(case, bs_last)

    def both_ways():
        y = fw.ksmm(x, w, bs_last, bias, "gelu", "kernel", case[3])
        return [y, *torch.autograd.grad(y, (x, w, bias), upstream)]

    upstream = torch.randn_like(fw.ksmm(x, w, bs_last, bias, "gelu", "kernel", case[3])).detach()
    first = both_ways()
    differing = torch.zeros(4, dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += torch.stack([(now != then).any() for now, then in zip(both_ways(), first, strict=True)])
    assert differing.tolist() == [0, 0, 0, 0]


@each_case
@both_layouts
def test_graph_capture_replays_on_new_data(case, bs_last):
    x, w, bias = (t.detach() for t in operands(case, bs_last))
    call = lambda: fw.ksmm(x, w, bs_last, bias, "silu", "kernel", case[3])  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for t in (x, w, bias):
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


@pytest.mark.parametrize("pattern", [(1, 192, 48, 2), (1, 256, 256, 16), (2, 96, 96, 4)], ids=str)
@both_layouts
def test_graphs_wait_for_packed_weights(pattern, bs_last):
    """The product starts while its weights are packed, also in a graph. New ones must never come too late."""
    x, w, _ = (t.detach() for t in operands((pattern, 1024, torch.float16, None), bs_last))
    call = lambda: fw.ksmm(x, w, bs_last, algo="kernel")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for n in range(300):
        w.normal_().mul_(pattern[2] ** -0.5)
        if n % 2:
            x.normal_()
        graph.replay()
        different += (out != call()).any()
    assert different.item() == 0


@pytest.mark.parametrize("pattern", [(4, 136, 152, 1), (1, 520, 264, 1), (2, 24, 40, 3)], ids=str)
@both_layouts
def test_a_first_call_can_be_captured(pattern, bs_last):
    """Kernels, ours and cuBLAS's, are loaded while a graph is captured."""
    x, w, _ = (t.detach() for t in operands((pattern, 4104, torch.float16, None), bs_last))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fw.ksmm(x, w, bs_last)
    x.normal_()
    graph.replay()
    dense = fw.kronecker.to_dense(w).double()
    exact = dense @ x.double() if bs_last else x.double() @ dense.T
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@both_layouts
def test_an_activation_is_another_choice(bs_last):
    """What was chosen for a product without one must not be taken for the same product with one."""
    x, w, bias = (t.detach() for t in operands(((1, 256, 256, 1), 4096, torch.float16, None), bs_last))
    plain = fw.ksmm(x, w, bs_last)
    torch.testing.assert_close(fw.ksmm(x, w, bs_last, activation="relu"), plain.relu(), rtol=1e-2, atol=1e-2)
    added = plain + (bias[:, None] if bs_last else bias)
    torch.testing.assert_close(fw.ksmm(x, w, bs_last, bias), added, rtol=1e-2, atol=1e-2)


MANY_BATCHES = """
import json, os, random, sys, torch, fretwork as fw
pattern, dtype, precision, bs_last = json.loads(sys.argv[1])
a, b, c, d = pattern
w = torch.randn(pattern, device="cuda").to(getattr(torch, dtype))
for batch in [1, 2, 16, 32, 33, 196, 1000, 25088] + random.Random(3).sample(range(1, 3000), 42):
    shape = (a * c * d, batch) if bs_last else (batch, a * c * d)
    fw.ksmm(torch.zeros(shape, device="cuda", dtype=w.dtype), w, bs_last, algo="kernel", precision=precision)
torch.cuda.synchronize()
"""
FIFTY = [
    *itertools.product(
        [(6, 64, 64, 1), (4, 64, 64, 4), (1, 48, 48, 16), (1, 64, 64, 64)], ["float16", "float32"], [None]
    ),
    ((1, 768, 192, 2), "bfloat16", None),
    ((1, 1024, 1024, 4), "float16", None),
    ((3, 192, 768, 4), "bfloat16", None),
    ((2, 768, 192, 16), "float16", None),
    ((1, 96, 384, 64), "bfloat16", None),
    ((1, 512, 512, 4), "float32", "tf32"),
    ((3, 100, 60, 3), "float16", None),
    ((1, 64, 33, 1), "float16", None),
    ((64, 8, 8, 4), "bfloat16", None),
    ((1, 128, 128, 16), "float32", "tf32"),
    ((2, 384, 384, 16), "float32", "ieee"),
]


@pytest.mark.parametrize(("pattern", "dtype", "precision"), FIFTY, ids=str)
@both_layouts
def test_fifty_batch_sizes_need_two_kernels(pattern, dtype, precision, bs_last, tmp_path):
    """One for a few rows and one for more. What packs weights is one for all patterns."""
    env = {**os.environ, "FRETWORK_CACHE_DIR": str(tmp_path)}
    arguments = json.dumps([pattern, dtype, precision, bs_last])
    run = subprocess.run([sys.executable, "-c", MANY_BATCHES, arguments], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    packs = ("pack", "regroup")
    kernels = [name for name in compiled(tmp_path) if not any(word in name for word in packs)]
    assert 1 <= len(kernels) <= 2, kernels


def compiled(folder: Path) -> list[str]:
    """The symbols of the kernels in a cache folder. A file is magic, checksum, key, symbol and more."""
    symbols = []
    for file in folder.rglob("*.kernel"):
        data = file.read_bytes()[len("fretwork kernel 1\n") + 16 :]
        for _ in range(2):
            length = int.from_bytes(data[:8], "little")
            field, data = data[8 : 8 + length], data[8 + length :]
        symbols.append(field.decode())
    return symbols
