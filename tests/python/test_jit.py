"""Kernels of the user's own."""

import copy
import ctypes
import pickle

import pytest
import torch

import fretwork as fw

SOURCE = """
#include "device/types.cuh"
template <typename T>
__global__ void scale(T* x, long long n, float by, bool twice) {
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < n) x[i] = fretwork::narrow<T>((twice ? 2 : 1) * by * fretwork::widen(x[i]));
}
"""


def scale(kind: str = "fretwork::f16") -> fw.jit.Kernel:
    return fw.jit.kernel(SOURCE, f"scale<{kind}>")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_a_gpu(arch):
    report = scale().compile(arch)
    assert report.registers > 0 and report.spills == 0


def test_says_what_does_not_compile():
    with pytest.raises(RuntimeError, match=r"(?s)broken: expected .*got .*undefined_thing"):
        fw.jit.kernel("__global__ void broken() { undefined_thing(); }", "broken").compile("sm_90a")
    with pytest.raises(RuntimeError, match=r"(?s)other: expected .*got "):
        fw.jit.kernel("__global__ void one() {}", "other").compile("sm_90a")


@pytest.mark.parametrize("source, name", [("", "f"), (b"x", "f"), ("x", ""), ("x", None)])
def test_texts_are_checked(source, name):
    with pytest.raises(TypeError, match=r"jit.kernel: \w+: expected a text, got "):
        fw.jit.kernel(source, name)


def test_arguments_are_checked(device):
    x = torch.zeros(4, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="argument 0: expected a tensor on a GPU, got one on cpu"):
            scale()(1, 256, x)
        return
    for grid in (0, (1, 2, 3, 4), (), -1, 1.5, (1, None)):
        with pytest.raises(ValueError, match="grid: expected one to three positive ints, got "):
            scale()(grid, 256, x)
    with pytest.raises(TypeError, match="argument 1: expected a tensor"):
        scale()(1, 256, x, "4")


def test_copies_load_for_themselves():
    """A handle of one process is none in another."""
    kernel = scale()
    kernel._loaded[0] = 1
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert (other.name, other._source, other._name) == (kernel.name, kernel._source, kernel._name)
        assert not other._loaded


def test_launches(device):
    if device.type == "cpu":
        pytest.skip("launching needs a GPU")
    for dtype, kind in ((torch.float16, "fretwork::f16"), (torch.bfloat16, "fretwork::bf16")):
        x = torch.randn(1000, device=device).to(dtype)
        want = x.clone()
        want[:900] = (x[:900].float() * 1.0).to(dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scale(kind)((4,), (256, 1), x, 900, ctypes.c_float(0.5), True)
        stream.synchronize()
        assert torch.equal(x, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(kind)(4, 256, x, 1000, ctypes.c_float(2), False)
    graph.replay()
    assert torch.equal(x, (want.float() * 2).to(dtype))
