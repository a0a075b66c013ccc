"""One captured graph, replayed a thousand times on other contents: masks, lists, selections and documents."""

import pytest
import torch
from conftest import TOLERANCE
from torch import Tensor

import fretwork as fw

SEQ, SIDE, HEADS, DEPTH, DTYPE = 384, 64, (8, 2), 64, torch.bfloat16
BLOCKS = SEQ // SIDE
REPLAYS = 1000


def draw_mask(device, n):
    """None, all, or any of the blocks."""
    density = (0.0, 1.0, 0.3)[min(n % 50, 2)]
    blocks = torch.rand(1, HEADS[1], BLOCKS, BLOCKS, device=device) < density
    wide = blocks.repeat_interleave(SIDE, -1).repeat_interleave(SIDE, -2)
    return [blocks], wide.repeat_interleave(HEADS[0] // HEADS[1], 1)


def draw_lists(device, n):
    """In any order, and numbers of any kind behind the counts."""
    (blocks,), mask = draw_mask(device, n)
    counts = blocks.sum(-1, dtype=torch.int32)
    order = (blocks + torch.rand(blocks.shape, device=device)).argsort(-1, descending=True)
    behind = torch.arange(BLOCKS, device=device) >= counts[..., None]
    garbage = torch.randint(-(2**31), 2**31 - 1, order.shape, device=device)
    return [counts, garbage.where(behind, order).int()], mask


def draw_selection(device, n):
    """Every 50th time all queries select the same block, or none any."""
    order = torch.rand(1, HEADS[1], SEQ, BLOCKS, device=device).argsort(-1)[..., :3]
    order[..., 0] = 0 if n % 50 == 0 else order[..., 0]
    order = torch.full_like(order, -1) if n % 50 == 1 else order
    chosen = (torch.arange(SEQ, device=device) // SIDE == order[..., None]).any(-2)
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool, device=device).tril()
    return [order.int()], (chosen & causal).repeat_interleave(HEADS[0] // HEADS[1], 1)


def draw_documents(device, n):
    """Five, which may be empty; every 50th time one holds all."""
    cuts = torch.randint(0, SEQ + 1, (6,), device=device).sort().values
    cuts[0], cuts[-1] = 0, SEQ
    cuts[1:-1] = SEQ if n % 50 == 0 else cuts[1:-1]
    of = torch.searchsorted(cuts, torch.arange(SEQ, device=device), right=True)
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool, device=device).tril()
    return [cuts.int()], ((of[:, None] == of) & causal)[None, None]


def by_document(q, k, v, starts):
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    o, lse = fw.varlen_attention(*packed, starts, causal=True, return_lse=True)
    return o.transpose(0, 1)[None], lse[None]


KINDS = {
    "mask": (draw_mask, lambda q, k, v, m: fw.attention(q, k, v, blocks=m, block=SIDE, return_lse=True)),
    "lists": (
        draw_lists,
        lambda q, k, v, *lists: fw.attention(q, k, v, blocks=fw.BlockLists(*lists), block=SIDE, return_lse=True),
    ),
    "selection": (draw_selection, lambda q, k, v, i: fw.selected_attention(q, k, v, i, SIDE, return_lse=True)),
    "documents": (draw_documents, by_document),
}


def right(qkv: list[Tensor], mask: Tensor, d_o: Tensor) -> list[Tensor]:
    """o and the gradients of q, k and v, in float32."""
    wide = [t.detach().float().requires_grad_() for t in qkv]
    q, k, v = wide[0], *(t.repeat_interleave(HEADS[0] // HEADS[1], 1) for t in wide[1:])
    share = (q @ k.mT * DEPTH**-0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0).masked_fill(~mask, 0)
    o = share @ v
    return [o.detach(), *torch.autograd.grad(o, wide, d_o.float())]


@pytest.mark.parametrize("kind", KINDS)
def test_replays(device, kind):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    draw, call = KINDS[kind]
    torch.backends.cuda.matmul.allow_tf32 = False
    qkv = [torch.randn(1, h, SEQ, DEPTH, device=device).to(DTYPE).requires_grad_() for h in (HEADS[0], *HEADS[1:] * 2)]
    d_o = torch.randn(1, HEADS[0], SEQ, DEPTH, device=device).to(DTYPE)
    known = draw(device, 2)[0]

    def step():
        o, lse = call(*qkv, *known)
        return [o, *torch.autograd.grad(o, qkv, d_o), lse]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    worst, same = torch.zeros((), device=device), torch.ones((), dtype=torch.bool, device=device)
    for n in range(REPLAYS):
        contents, mask = draw(device, n)
        with torch.no_grad():
            for old, new in zip(known, contents, strict=True):
                old.copy_(new)
            for t in qkv:
                t.copy_(torch.randn_like(t))
        graph.replay()
        for got, want in zip(found, right(qkv, mask, d_o), strict=False):
            error = (got.float() - want).abs().amax() / want.abs().amax().clamp(min=1)
            worst = torch.maximum(worst, error.nan_to_num(torch.inf))
        if n % 20 == 0:
            first = [t.clone() for t in found]
            graph.replay()
            again = zip(found, first, step(), strict=True)
            same &= torch.stack([(a == b).all() & (a == c).all() for a, b, c in again]).all()
    assert worst <= TOLERANCE[DTYPE] and same
