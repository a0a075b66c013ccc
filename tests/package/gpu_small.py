"""A short run of every kind of kernel on tiny shapes, for compute-sanitizer: python tests/package/gpu_small.py [cpu]

A few hundred launches: every product with every transpose, twice, over types, precisions and blocks in turn (gradients
are products too), then a row long enough to be split, lines with few blocks, softmax with its extras and gradients,
packing, convolutions with their gradients, Kronecker products, attention in each class of kernels with its gradients,
decoding and SPLAT's operators, and 2:4 products and tools. `gpu_small.py cuda two_four` runs one part alone.
"""

import inspect
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


def many_lines(device):
    """More lines of 64 rows than a GPU has multiprocessors, with few blocks: the ends of two lines share a tile."""
    for dtype, block, trans in ((torch.float16, 64, False), (torch.bfloat16, 16, True), (torch.float16, 32, False)):
        layout = fw.BlockLayout(torch.rand(140 * 64 // block, 5) < 0.3, block)
        _, m, n = layout.shape
        a, b = turned(tensor(device, dtype, m, 136), trans), tensor(device, dtype, 136, n)
        fw.sdd(a, b, layout, trans)


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


def convolutions(device):
    """Both memory formats, in turn with the types; strides, dilation, a kernel of even size, a kernel of one."""
    cases = [
        (16, (3, 3), {"padding": 1}), (32, (3, 3), {"padding": 1, "stride": 2}), (64, (1, 1), {}),
        (8, (2, 4), {"padding": "same"}), (128, (3, 3), {"padding": 2, "dilation": 2}),
        ((16, 32), (1, 3), {"stride": 3}),
    ]  # fmt: skip
    for n, (block, kernel, geometry) in enumerate(cases):
        layout = fw.BlockLayout.for_conv2d(torch.rand(2, 3, *kernel) < 0.7, block)
        for m in range(2):
            dtype, precision = KINDS[(2 * n + m) % len(KINDS)]
            x = tensor(device, dtype, 2, layout.shape[2], 13, 11)
            x = (x.contiguous(memory_format=torch.channels_last) if (n + m) % 2 else x).requires_grad_()
            values = tensor(device, dtype, layout.nnz, *layout.block_shape).requires_grad_()
            bias = tensor(device, dtype, layout.shape[1]).requires_grad_()
            options = {**geometry, "bias": bias, "precision": precision}
            fw.block_conv2d(x, values, layout, kernel, **options).square().sum().backward()
    if torch.device(device).type != "cuda":
        return
    orders = torch.contiguous_format, torch.channels_last
    for block, memory_format in itertools.product((64, 32), orders):  # pixels for whole machines
        layout = fw.BlockLayout.for_conv2d(torch.rand(128 // block, 128 // block, 3, 3) < 0.3, block)
        x = tensor(device, torch.float16, 12, 128, 56, 56).contiguous(memory_format=memory_format)
        bias = tensor(device, torch.float16, 128)
        values = tensor(device, torch.float16, layout.nnz, block, block)
        fw.block_conv2d(x, values, layout, 3, padding=1, bias=bias)


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
    fw.ksmm(tensor(device, torch.float16, 140, 16384), tensor(device, torch.float16, 8, 100, 512, 4), algo="kernel")
    for batch in (3, 16, 40):  # clusters that share the depth of a few rows
        fw.ksmm(tensor(device, torch.float16, batch, 2400), tensor(device, torch.float16, 1, 40, 600, 4), algo="kernel")
    for sizes in ((2, 136, 200, 4), (1, 600, 200, 2), (1, 40, 32, 16)):  # rows of neighbouring δ by the copy engine
        a, b, c, d = sizes
        x, bias = tensor(device, torch.float16, 300, a * c * d), tensor(device, torch.float16, a * b * d)
        fw.ksmm(x, tensor(device, torch.float16, *sizes), False, bias, "silu", "kernel")
    w = tensor(device, torch.float16, 1, 192, 48, 2)  # which CTAs keep
    fw.ksmm(tensor(device, torch.float16, 300, 96), w, algo="kernel")
    fw.ksmm(tensor(device, torch.float16, 96, 304), w, True, algo="kernel")


def chains(device: str) -> None:
    """Monarch matrices that one CTA, a cluster of four and one of eight fuse, over several turns of every ring."""
    for sizes, batch in (((1024, 1024, 32, 32), 99), ((2048, 2048, 32, 32), 99), ((4096, 4096, 64, 64), 2100)):
        first, second = (tensor(device, torch.float16, *p.weight_shape) for p in fw.kronecker.monarch(*sizes))
        bias = tensor(device, torch.float16, sizes[0])
        fw.ksmm_chain(tensor(device, torch.float16, batch, sizes[1]), [first, second], bias=bias, activation="relu")


# Type, depths of keys and values, pattern (in several components, with masks of bits, with unused keys, or with few
# long rows or columns, whose tiles are cut and shared by heads), options.
ATTENTION = [
    (torch.bfloat16, 64, 64, "strided(300,16)", {}),
    (torch.float16, 128, 128, "sliding_window(200,70,0) & dilated(200,60,3)", {}),
    (torch.bfloat16, 64, 128, "dilated((150,300),9,4,offset=0)", {}),
    (torch.bfloat16, 128, 128, "causal((40,3000))", {}),
    (torch.float16, 192, 128, "full((3000,40))", {}),
    (torch.bfloat16, 256, 256, "neighborhood((12,16),(5,5))", {}),
    (torch.bfloat16, 128, 64, "place(neighborhood((12,16),7,stride=2),(300,260),at=(31,7))", {}),
    (torch.float16, 64, 64, "with_prefix(sliding_tile((16,16),4,3),3)[10:,5:]", {}),
    (torch.float16, 32, 32, "longformer(150,20,(0,77))", {"softcap": 3.0, "dropout_p": 0.2}),
    (torch.bfloat16, 72, 40, "causal(150)", {"bias": True}),
    (torch.float32, 100, 128, "causal(100)", {"precision": "tf32"}),
    (torch.float32, 24, 40, "strided(150,16)", {"bias": True}),
]


def attention(device):
    """Two query heads share a key head; the last call has a pattern for each."""
    for dtype, depth, values, text, options in ATTENTION:
        pattern = fw.Pattern.parse(text)
        rows, cols = pattern.shape
        more = dict(options, bias=tensor(device, dtype, 4, 1, cols).requires_grad_()) if "bias" in options else options
        shapes = ((2, 4, rows, depth), (2, 2, cols, depth), (2, 2, cols, values))
        q, k, v = (tensor(device, dtype, *s).requires_grad_() for s in shapes)
        fw.attention(q, k, v, pattern, **more).square().sum().backward()
    other = fw.Pattern.parse("causal(150)")
    fw.attention(q, k, v, [pattern, other, other, pattern]).square().sum().backward()
    cols = k.shape[2]
    padding = torch.arange(cols, device=device)[None] % 5 > 2
    far = torch.zeros(cols, device=device)
    far[cols // 2 :] = -1e30
    for dtype in (torch.float32, torch.bfloat16):
        operands = [tensor(device, dtype, 2, h, cols, 64).requires_grad_() for h in (4, 2, 2)]
        for bias in (None, far.clone().requires_grad_()):
            o = fw.attention(*operands, pattern, bias=bias, key_padding_mask=padding.expand(q.shape[0], cols))
            o.square().sum().backward()


SINKS = [
    (torch.bfloat16, 128, "causal(300)", {}),
    (torch.float16, 64, "strided(300,16)", {}),
    (torch.bfloat16, 64, "longformer(1500,20,(0,7))", {}),
    (torch.bfloat16, 64, "causal((300,150))", {"softcap": 3.0}),
    (torch.float16, 64, "strided(300,16)", {"bias": True}),
    (torch.bfloat16, 192, "sliding_window(300,20,3)", {}),
    (torch.bfloat16, 40, "causal((9,700))", {}),
    (torch.float32, 40, "strided(150,16)", {"bias": True}),
    (torch.bfloat16, 20, "causal(150)", {}),
]


def sinks(device):
    """In rows of one component and of several, with keys and without, split and whole, with options and none."""
    for dtype, depth, text, options in SINKS:
        pattern = fw.Pattern.parse(text)
        rows, cols = pattern.shape
        more = dict(options, bias=tensor(device, dtype, 4, 1, cols).requires_grad_()) if "bias" in options else options
        q, k, v = (tensor(device, dtype, 2, h, s, depth).requires_grad_() for h, s in ((4, rows), (2, cols), (2, cols)))
        scores = tensor(device, dtype, 4).requires_grad_()
        fw.attention(q, k, v, pattern, sinks=scores, **more).square().sum().backward()
        with torch.no_grad():
            fw.attention(q, k, v, pattern, sinks=scores.float(), **more)


def selection(device):
    for dtype, depth, rows, cols in (
        (torch.bfloat16, 128, 500, 700),
        (torch.float16, 33, 100, 90),
        (torch.float32, 64, 40, 120_000),
    ):
        q, k = (tensor(device, dtype, 2, h, s, depth) for h, s in ((4, rows), (2, cols)))
        fw.select_blocks(q, k, 5, 16)
        fw.select_blocks(q, k, 3, (64, 32), causal=False, first=0)


def dynamic_attention(device):
    """Blocks as a mask and as lists, with a pattern and a bias; selections; documents; all with gradients."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (tensor(device, dtype, 2, h, n, 40).requires_grad_() for h, n in ((4, 75), (2, 90), (2, 90)))
        blocks = (torch.rand(1, 2, 5, 3) < 0.6).to(device)
        counts, indices = blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(-1, descending=True).int()
        bias = tensor(device, dtype, 75, 90).requires_grad_()
        fw.attention(q, k, v, fw.patterns.causal((75, 90)), blocks=blocks, block=(16, 32)).square().sum().backward()
        lists = fw.BlockLists(counts, indices)
        fw.attention(q, k, v, bias=bias, blocks=lists, block=(16, 32)).square().sum().backward()
        chosen = torch.randint(-1, 6, (2, 2, 75, 1), dtype=torch.int32).to(device)
        fw.selected_attention(q, k, v, chosen, 16).square().sum().backward()
        starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 40, 40, 75], [0, 30, 50, 85])]
        packed = [t[0].transpose(0, 1) for t in (q, k, v)]
        fw.varlen_attention(*packed, *starts, causal=True, window=(20, None)).square().sum().backward()


def dynamic_attention_of_tiles(device):
    """Blocks of 64 and 128; selections whose lists are long enough to be split, in groups of 1 to 40 heads."""
    for dtype, depth, side in ((torch.bfloat16, 128, 128), (torch.float16, 64, 64)):
        q, k, v = (tensor(device, dtype, 1, h, 300, depth).requires_grad_() for h in (4, 2, 2))
        blocks = torch.rand(1, 2, -(-300 // side), -(-300 // side)).to(device) < 0.6
        fw.attention(q, k, v, fw.patterns.causal(300), blocks=blocks, block=side).square().sum().backward()
        packed = [t[0].transpose(0, 1) for t in (q, k, v)]
        starts = torch.tensor([0, 100, 100, 290], dtype=torch.int32, device=device)
        fw.varlen_attention(*packed, starts, causal=True).square().sum().backward()
    for dtype, depth, heads, block in (
        (torch.bfloat16, 128, 32, 64),
        (torch.float16, 64, 40, 32),
        (torch.bfloat16, 72, 1, 16),
    ):
        q, k, v = (tensor(device, dtype, 1, h, 300, depth).requires_grad_() for h in (heads, 1, 1))
        chosen = torch.randint(-1, 300 // block, (1, 1, 300, 3), dtype=torch.int32)
        chosen[..., 0] = 0
        fw.selected_attention(q, k, v, chosen.to(device), block).square().sum().backward()


def decoding(device):
    for dtype, depth in ((torch.float16, 64), (torch.bfloat16, 128)):
        pattern = fw.patterns.sinks((2, 1500), 4, 900)
        q, k, v = (tensor(device, dtype, 1, h, s, depth) for h, s in ((4, 2), (2, 1500), (2, 1500)))
        fw.attention(q, k, v, pattern)
        padding = torch.arange(k.shape[2], device=device)[None] % 3 == 0
        fw.attention(q, k, v, pattern, key_padding_mask=padding.expand(q.shape[0], -1))


def operators(device):
    """Tiles of several waves, with rows that begin anywhere in their 16 bytes; and lists."""
    cases = (fw.patterns.longformer(1701, 5, [3]), torch.float16), (fw.patterns.strided(200, 16), torch.float32)
    for pattern, dtype in cases:
        q, k, v = (tensor(device, dtype, 1, h, pattern.shape[0], 24).requires_grad_() for h in (4, 2, 2))
        fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, pattern), pattern, 0.3), v, pattern).square().sum().backward()


def two_four(device):
    """Few columns, more, and enough for several tiles; operands that must be copied first; then the tools."""
    kinds = [*KINDS, (torch.int8, None), (torch.uint8, None), (torch.float8_e4m3fn, None), (torch.float8_e5m2, None)]
    integers, outs = (torch.int8, torch.uint8), (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    shapes, narrow = ((40, 64, 3), (72, 272, 40), (300, 1024, 392), (33, 36, 17)), ((128, 512, 24), (192, 1152, 64))
    for n, (dtype, precision) in enumerate(kinds):
        # Copies and the way along an axis go by a type's size, which another has.
        twin = dtype in (torch.float8_e5m2, torch.uint8)
        for m, k, columns in (*(shapes[:3] if twin else shapes), *(narrow if dtype == torch.bfloat16 else ())):
            s = fw.two_four.compress(fw.two_four.prune((tensor(device, torch.float16, m, k) * 3).abs().to(dtype)))
            x, bias = (tensor(device, torch.float16, *shape).abs() for shape in ((columns, k), (m,)))
            x, bias = x.to(dtype), bias if dtype in integers else bias.to(dtype if n < len(KINDS) else torch.bfloat16)
            fw.two_four.matmul(x, s.T, precision=precision)
            out = torch.float16 if dtype in integers else None
            fw.two_four.matmul(s, x.t().contiguous(), bias, "gelu", out, precision=precision)
            if dtype == torch.int8 or columns > 300:  # threads convert, in every class of kernels
                scale = torch.full((), 0.5, device=device)
                fw.two_four.matmul(x, s.T, out_dtype=outs[n % 3], scale_out=scale, precision=precision)
        A = tensor(device, torch.float16, 40, 72).abs().to(dtype)
        for dim in (1,) if twin else (0, 1):
            p = fw.two_four.prune(A, dim)
            fw.two_four.compress(p, dim).to_dense()
        torch.ops.fretwork.two_four_prune_both(A, torch.int16)
    fw.TwoFour(s.values, s.metadata.view(torch.uint16))


def takes_a_device(thing):
    return inspect.isfunction(thing) and list(inspect.signature(thing).parameters) == ["device"]


PARTS = [thing for thing in list(globals().values()) if takes_a_device(thing)]


def main(device: str = "cuda", *names: str) -> None:
    torch.manual_seed(0)
    for part in PARTS:
        if not names or part.__name__ in names:
            part(device)
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
