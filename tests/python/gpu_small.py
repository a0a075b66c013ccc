"""A short run of every kernel kind on small shapes, for compute-sanitizer: python tests/python/gpu_small.py"""

import torch

import fretwork as fw


def main() -> None:
    torch.manual_seed(0)
    for block in (8, 16, 32, 64, 128, (16, 32)):
        mask = torch.rand(2, 3, 4) < 0.6
        layout = fw.BlockLayout(mask, block)
        _, m, n = layout.shape
        for dtype in (torch.float16, torch.float32):
            values = torch.randn(1, layout.nnz, *(layout.block if isinstance(layout.block, tuple) else (block, block)))
            values = values.to("cuda", dtype).requires_grad_()
            for free in (40, 264):
                b = torch.randn(1, 2, n, free, device="cuda", dtype=dtype, requires_grad=True)
                a = torch.randn(1, 2, free, m, device="cuda", dtype=dtype, requires_grad=True)
                fw.dsd(values, b, layout).sum().backward()
                fw.dds(a, values, layout).sum().backward()
            fw.block_softmax(values, layout, scale=0.5).square().sum().backward()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
