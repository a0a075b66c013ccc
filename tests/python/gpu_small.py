"""A short run of every kernel kind on small shapes, for compute-sanitizer: python tests/python/gpu_small.py [cpu]"""

import sys

import torch

import fretwork as fw


def main(device: str = "cuda") -> None:
    torch.manual_seed(0)
    for block in (8, 16, 32, 64, 128, (16, 32)):
        layout = fw.BlockLayout(torch.rand(2, 3, 4) < 0.6, block)
        _, m, n = layout.shape
        sides = block if isinstance(block, tuple) else (block, block)
        for dtype in (torch.float16, torch.float32):
            values = torch.randn(1, layout.nnz, *sides).to(device, dtype).requires_grad_()
            for free in (40, 264):
                b = torch.randn(1, 2, n, free).to(device, dtype).requires_grad_()
                a = torch.randn(1, 2, free, m).to(device, dtype).requires_grad_()
                fw.dsd(values, b, layout).sum().backward()
                fw.dds(a, values, layout).sum().backward()
            fw.block_softmax(values, layout, scale=0.5).square().sum().backward()
    for sizes in ((1, 3, 5, 1), (2, 48, 33, 2), (4, 64, 64, 4), (1, 64, 64, 16), (16, 32, 32, 1)):
        a, b, c, d = sizes
        for dtype in (torch.float16, torch.float32):
            w = torch.randn(sizes).to(device, dtype).requires_grad_()
            bias = torch.randn(a * b * d).to(device, dtype).requires_grad_()
            for shape, bs_last in (((1, a * c * d), False), ((77, a * c * d), False), ((a * c * d, 77), True)):
                x = torch.randn(shape).to(device, dtype).requires_grad_()
                fw.ksmm(x, w, bs_last, bias, "gelu", "kernel").sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
