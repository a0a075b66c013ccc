"""Kernels of the user's own."""

import copy
import ctypes
import pickle
import re

import numpy as np
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
    for grid in (0, (1, 2, 3, 4), (), -1, 1.5, (1, None), True, "4", torch.tensor(1.5)):
        with pytest.raises(ValueError, match="grid: expected one to three positive ints, got " + re.escape(repr(grid))):
            scale()(grid, 256, x)
    for kind, options, match in [
        (TypeError, {"n": "4"}, "argument 1: expected a tensor"),
        (ValueError, {"n": 2**64}, "argument 1: expected an int of 64 bits"),
        (ValueError, {"shared_memory": 1.5}, "shared_memory: expected bytes"),
    ]:
        with pytest.raises(kind, match=match):
            scale()(1, 256, x, options.pop("n", 4), **options)
    pair = type("Pair", (ctypes.Union,), {"_fields_": [("whole", ctypes.c_int), ("part", ctypes.c_short)]})
    if device.type == "cpu":  # what is wrong is the tensor, which is looked at last
        with pytest.raises(ValueError, match="argument 0: expected a tensor on a GPU, got one on cpu"):
            scale()(np.int64(1), (256, np.int32(1)), x, pair(3), shared_memory=np.int64(16))
    with pytest.raises(TypeError, match="arch: expected a name such as sm_90a, got 90"):
        scale().compile(90)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="argument 0: expected a tensor on a GPU, got one on cpu"):
            scale()(1, 256, x)
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="device: expected a GPU, got none"):
                scale()(1, 256)
        return
    for arguments, match in [
        ((x, 4, ctypes.c_float(1)), "arguments: expected more, got 3"),
        ((x, 4, ctypes.c_float(1), True, 5), "arguments: expected at most 4, got 5"),
        ((x, 4, 1.0, True), "argument 2: expected 4 bytes, got 8"),
    ]:
        with pytest.raises(RuntimeError, match=match):
            scale()(1, 256, *arguments)


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


REVERSED = """
using namespace fretwork;

struct reversed {  // rows from last to first, a row's words too
  const u16* words;
  u32 each, last_row;
  __device__ u32 operator()(u32 row, u32 word) const {
    const u16* const last = words + (last_row - row) * 4 * each + 4 * each - 1;
    u32 found = 0;
    for (u32 n = 0; n < each; ++n) found |= u32(*(last - word * each - n)) << 16 * n;
    return found;
  }
};
"""
# A warp multiplies 32 rows by 16 columns of one stage. Metadata lies in the order of the layout above, operands in
# shared memory or, from there, in registers.
GEMM_SP = f"""
#include "device/gemm_sp.cuh"
{REVERSED}"""
GEMM_SP += """
template <typename T, bool AlongK, bool Registers, typename Sum>
__global__ void stage(const u8* values, const u16* words, const u8* b, Sum* out) {
  constexpr int kLine = AlongK ? kDepthBytes : 128, kLines = AlongK ? 16 : sparse_depth<T>;
  __shared__ __align__(128) u8 memory[32 * kValueBytes + kLines * kLine];
  const value_tile kept{shared_address(memory)};
  const shared_tile<kLine> dense{kept.base + 32 * kValueBytes};
  copy_lines<32, kValueBytes / 16, 32>(kept, values, kValueBytes, 32, kValueBytes / 16);
  copy_lines<kLines, kLine / 16, 32>(dense, b, kLine, kLines, kLine / 16);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  Sum sums[2][2][4] = {};
  const reversed layout{words, sparse_word<T> / 4, 31};
  if constexpr (Registers) {
    register_values<2> a;
    register_columns<2> columns;
    for (int n = 0; n < 2; ++n) {
      load_values<0>(a.at[n][0], kept, 16 * n);
      load_values<1>(a.at[n][1], kept, 16 * n);
      load_columns<0, T, AlongK>(columns.at[n][0], dense, 8 * n);
      load_columns<1, T, AlongK>(columns.at[n][1], dense, 8 * n);
    }
    gemm_sp<T, AlongK>(sums, a, columns, layout, 0, 0);
  } else {
    gemm_sp<T, AlongK>(sums, kept, dense, layout, 0, 0);
  }
  const int lane = threadIdx.x;
  for (int n = 0; n < 16; ++n) {
    const int r = n / 8, c = n / 4 % 2, e = n % 4;
    out[(16 * r + lane / 4 + e / 2 * 8) * 16 + 8 * c + lane % 4 * 2 + e % 2] = sums[r][c][e];
  }
}
"""


STAGES = [
    ("fretwork::bf16", torch.bfloat16, True, False),
    ("fretwork::bf16", torch.bfloat16, False, True),
    ("fretwork::f16", torch.float16, True, True),
    ("float", torch.float32, True, False),
    ("float", torch.float32, False, True),
    ("signed char", torch.int8, True, True),
    ("unsigned char", torch.uint8, True, False),
    ("fretwork::f8_e4m3", torch.float8_e4m3fn, True, False),
    ("fretwork::f8_e5m2", torch.float8_e5m2, True, True),
]
INTEGERS = (torch.int8, torch.uint8)


@pytest.mark.parametrize("kind, dtype, along_k, registers", STAGES)
def test_gemm_sp(kind, dtype, along_k, registers, device):
    integers, fp8 = dtype in INTEGERS, dtype.is_floating_point and dtype.itemsize == 1
    flags = ", ".join("true" if flag else "false" for flag in (along_k, registers))
    kernel = fw.jit.kernel(GEMM_SP, f"stage<{kind}, {flags}, {'int' if integers else 'float'}>")
    if device.type == "cpu":
        assert all(kernel.compile(arch).spills == 0 for arch in ("sm_89" if fp8 else "sm_80", "sm_90a"))
        return
    if fp8 and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("fp8 begins with sm_89")
    torch.manual_seed(0)
    k = 128 // dtype.itemsize
    # Small whole numbers: sums are exact in every type.
    least, most = (0, 9) if dtype == torch.uint8 else (-4, 4) if fp8 else (-9, 9)
    wide = torch.float32 if k == 32 else torch.half
    A = fw.two_four.prune(torch.randint(least, most + 1, (32, k), device=device).to(wide))
    s = fw.two_four.compress(A.to(dtype))
    B = torch.randint(least, most + 1, (k, 16), device=device)
    line = 16 if along_k else 128 // dtype.itemsize  # of rows of b there are 128 bytes
    b = B.T if along_k else torch.nn.functional.pad(B, (0, line - 16))
    out = torch.empty(32, 16, device=device, dtype=torch.int32 if integers else torch.float32)
    words = s.metadata.flip(0, 1).contiguous()
    kernel(1, 32, s.values.contiguous(), words, b.to(dtype).contiguous(), out)
    assert torch.equal(out.double(), A.double() @ B.double())


# A warpgroup multiplies 64 rows by 128 columns of one stage on Hopper.
HOPPER = f"""
#include "device/gemm_sp_hopper.cuh"
{REVERSED}"""
HOPPER += """
template <typename T, typename Sum>
__global__ void __launch_bounds__(128) stage(const u8* values, const u16* words, const u8* b, Sum* out) {
  __shared__ __align__(1024) u8 memory[64 * kValueBytes + 128 * kDepthBytes];
  const value_tile kept{shared_address(memory)};
  const swizzled_tile dense{kept.base + 64 * kValueBytes};
  copy_lines<64, kValueBytes / 16, 128>(kept, values, kValueBytes, 64, kValueBytes / 16);
  copy_lines<128, kDepthBytes / 16, 128>(dense, b, kDepthBytes, 128, kDepthBytes / 16);
  copy_async_commit();
  copy_async_wait<0>();
  tiles_written();
  __syncthreads();
  Sum sums[64] = {};
  gemm_sp<T, 128>(sums, kept, dense, reversed{words, sparse_word<T> / 4, 63}, 0, 0);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int n = 0; n < 64; ++n) {
    out[(row + n % 4 / 2 * 8) * 128 + n / 4 * 8 + lane % 4 * 2 + n % 2] = sums[n];
  }
}
"""


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("fretwork::bf16", torch.bfloat16),
        ("fretwork::f16", torch.float16),
        ("float", torch.float32),
        ("signed char", torch.int8),
        ("unsigned char", torch.uint8),
        ("fretwork::f8_e4m3", torch.float8_e4m3fn),
        ("fretwork::f8_e5m2", torch.float8_e5m2),
    ],
)
def test_gemm_sp_on_hopper(kind, dtype, device):
    integers = dtype in INTEGERS
    kernel = fw.jit.kernel(HOPPER, f"stage<{kind}, {'int' if integers else 'float'}>")
    if device.type == "cpu":
        assert kernel.compile("sm_90a").spills == 0
        return
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("wgmma is Hopper's")
    torch.manual_seed(0)
    k = 128 // dtype.itemsize
    wide = torch.float32 if k == 32 else torch.half
    least = 0 if dtype == torch.uint8 else -4
    A = fw.two_four.prune(torch.randint(least, 5, (64, k), device=device).to(wide))  # exact in every type
    s = fw.two_four.compress(A.to(dtype))
    B = torch.randint(least, 5, (128, k), device=device).to(wide)
    out = torch.empty(64, 128, device=device, dtype=torch.int32 if integers else torch.float32)
    kernel(1, 128, s.values.contiguous(), s.metadata.flip(0, 1).contiguous(), B.to(dtype), out)
    assert torch.equal(out.double(), A.double() @ B.double().T)
