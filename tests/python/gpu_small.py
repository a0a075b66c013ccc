"""A short run of every kind of kernel on tiny shapes, for compute-sanitizer: python tests/python/gpu_small.py [cpu]

About fifty launches: every product with every transpose, twice, over types, precisions and blocks in turn (gradients
are products too), then a row long enough to be split, softmax with its extras and gradients, and packing.
"""

import itertools
import sys

import torch

import fretwork as fw

BLOCKS = [8, 16, 32, 64, 128, (16, 32), (24, 8)]
KINDS = [
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "tf32x3"),
]


def tensor(device, dtype, *shape):
    return torch.randn(shape).to(device, dtype)


def turned(x, trans):
    return x.mT.contiguous() if trans else x


def products(device):
    calls = itertools.product((0, 1), ("sdd", "dsd", "dds"), (False, True), (False, True))
    for n, (_, op, trans_a, trans_b) in enumerate(calls):
        dtype, precision = KINDS[n % len(KINDS)]
        layout = fw.BlockLayout(torch.rand(2, 2, 3) < 0.7, BLOCKS[n % len(BLOCKS)])
        _, m, n_ = layout.shape
        free = 40 if n % 2 else 136  # one tile and a bit, or less than one
        values = tensor(device, dtype, layout.nnz, *layout.block_shape)
        if op == "sdd":
            a, b = tensor(device, dtype, 2, m, free), tensor(device, dtype, 2, free, n_)
            a, b = turned(a, trans_a), turned(b, trans_b)
        elif op == "dsd":
            a, b = values, turned(tensor(device, dtype, 2, m if trans_a else n_, free), trans_b)
        else:
            a, b = turned(tensor(device, dtype, 2, free, n_ if trans_b else m), trans_a), values
        getattr(fw, op)(a, b, layout, trans_a, trans_b, precision=precision)


def long_rows(device):
    """A row of 1280 columns beside a short one: it is split and its parts are added."""
    layout = fw.BlockLayout(torch.tensor([[1] * 40, [1] + [0] * 39]), 32)
    for dtype in (torch.float16, torch.float32):
        values = tensor(device, dtype, layout.nnz, 32, 32)
        fw.dsd(values, tensor(device, dtype, 1280, 16), layout, precision="tf32")
        fw.block_softmax(values, layout)


def softmax(device):
    for dtype, block in ((torch.float16, 8), (torch.bfloat16, 32), (torch.float32, (16, 32))):
        layout = fw.BlockLayout(torch.rand(2, 2, 3) < 0.7, block)
        heads, m, n = layout.shape
        values = tensor(device, dtype, 2, layout.nnz, *layout.block_shape).requires_grad_()
        # Each element of rpe's gradient is added up by a thread, or by a block of threads.
        rpe = tensor(device, dtype, *((n,) if dtype == torch.bfloat16 else (heads, m, n))).requires_grad_()
        fw.block_softmax(values, layout, 0.5, rpe).square().sum().backward()
        key_padding, attn = torch.rand(2, n) < 0.8, torch.rand(m, n) < 0.8
        numbers = {"key_padding_mask": key_padding.to(device, dtype), "attn_mask": attn.to(device)}
        fw.block_softmax(values.detach(), layout, 0.5, **numbers, attn_mask_mode="mul")
        numbers = {"key_padding_mask": key_padding.to(device), "attn_mask": attn.to(device, dtype)}
        fw.block_softmax(values.detach(), layout, 0.5, **numbers, key_padding_mask_mode="mul")
    fw.block_softmax(values.detach().mT.contiguous().mT, layout, -0.5)  # no neighbours to read at once


def packing(device):
    for dtype, block in ((torch.float16, 8), (torch.float32, (9, 11))):
        layout = fw.BlockLayout(torch.rand(2, 2, 3) < 0.7, block)
        layout.unpack(layout.pack(tensor(device, dtype, *layout.shape)), fill=1.0)


def kronecker(device):
    """Gradients are a product and the weights' kernel."""
    for n, sizes in enumerate([(1, 3, 5, 1), (2, 48, 33, 2), (4, 64, 64, 4), (1, 64, 64, 16), (16, 32, 32, 1)]):
        a, b, c, d = sizes
        dtype, precision = KINDS[n % len(KINDS)]
        w = tensor(device, dtype, *sizes).requires_grad_()
        bias = tensor(device, dtype, a * b * d).requires_grad_()
        for shape, bs_last in (((77, a * c * d), False), ((a * c * d, 80), True)):
            x = tensor(device, dtype, *shape).requires_grad_()
            fw.ksmm(x, w, bs_last, bias, "gelu", "kernel", precision).sum().backward()
            few = x.detach()[:, : 3 + 9 * (n % 2)] if bs_last else x.detach()[: 3 + 9 * (n % 2)]
            fw.ksmm(few, w.detach(), bs_last, bias.detach(), None, "kernel", precision)


def main(device: str = "cuda") -> None:
    torch.manual_seed(0)
    for part in (products, long_rows, softmax, packing, kronecker):
        part(device)
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
