"""Layers and ops over ranks: parts of every kind of layer, checkpoints of them, sharded parameters, DTensors."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import assert_close
from ranks import on_ranks  # noqa: F401 (a fixture)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fretwork as fw
import fretwork.distributed as fd

P, F32 = fw.patterns, torch.float32

# Kronecker chains that are cut along a, along b and c, in one block of several, and not at all.
CHAINS = [
    [(12, 3, 2, 1), (12, 2, 3, 1)],
    [(1, 8, 12, 3), (1, 12, 8, 3)],
    [(2, 6, 12, 1), (2, 12, 6, 1)],
    [(12, 1, 3, 1), (2, 6, 6, 1), (1, 5, 12, 1), (5, 12, 1, 1)],
]


def same(rank, world, layer, bs_last=False):
    """Two layers in a row against whole ones, in results, gradients and a step of SGD."""
    down = copy.deepcopy(layer)
    for cut, style, full in ((copy.deepcopy(layer), fd.ColwiseParallel(), layer), (down, fd.RowwiseParallel(), layer)):
        column = isinstance(style, fd.ColwiseParallel)
        cut = parallelize_module(nn.ModuleDict({"a": cut}), init_device_mesh("cpu", (world,)), {"a": style})["a"]
        full = copy.deepcopy(full)
        dim = 0 if bs_last else -1
        shape = (layer.in_features, 5) if bs_last else (2, 5, layer.in_features)
        x, part = torch.randn(shape, requires_grad=True), layer.in_features // world
        mine = x.detach() if column else x.detach().narrow(dim, rank * part, part)
        mine = mine.clone().requires_grad_()
        for _ in range(2):
            want, got = full(x), cut(mine)
            d = torch.randn_like(want)
            width = want.shape[dim] // world
            assert_close(got, want.narrow(dim, rank * width, width) if column else want, F32)
            for model in (full, cut):
                model.zero_grad()
            want.backward(d)
            got.backward(d.narrow(dim, rank * width, width) if column else d)
            assert_close(mine.grad, x.grad if column else x.grad.narrow(dim, rank * part, part), F32)
            x.grad = mine.grad = None
            with torch.no_grad():
                for p in [*full.parameters(), *cut.parameters()]:
                    p -= 0.1 * p.grad


def parts_of_layers(rank, world):
    for chain in CHAINS:
        same(rank, world, fw.nn.KSLinear(chain))
        same(rank, world, fw.nn.KSLinear(chain, bs_last=True, bias=False), bs_last=True)
    layout = fw.BlockLayout((torch.rand(12, 24) < 0.3).int(), block=(16, 8))
    same(rank, world, fw.nn.BlockSparseLinear(192, 192, layout))
    same(rank, world, fw.nn.SemiSparseLinear(192, 96))
    same(rank, world, fw.nn.SemiSparseLinear(192, 96, prune="magnitude", trainable="dense", decay=0.01))
    same(rank, world, fw.nn.SemiSparseLinear.from_dense(nn.Linear(192, 96), prune="transposable"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_of_layers(on_ranks, world):
    on_ranks(world, parts_of_layers)


def test_styles_refuse():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    try:
        text = "ColwiseParallel: module: expected one of BlockSparseLinear, SemiSparseLinear, KSLinear, got ReLU"
        with pytest.raises(TypeError, match=text):
            parallelize_module(nn.ReLU(), mesh, fd.ColwiseParallel())
        layer = parallelize_module(fw.nn.SemiSparseLinear(64, 32), mesh, fd.RowwiseParallel())
        with pytest.raises(RuntimeError, match=r"RowwiseLinear: x: expected \(…, 64\), got \(3, 63\)"):
            layer(torch.zeros(3, 63))
        assert set(layer.state_dict()) == {"bias", "shard0of1.values", "shard0of1.metadata"}
    finally:
        dist.destroy_process_group()


def uneven(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for layer in (fw.nn.SemiSparseLinear(66, 12), fw.nn.KSLinear([(5, 5, 2, 1)])):
        with pytest.raises(ValueError, match=r"Parallel: (in|out)_features: expected a multiple of 2 ranks"):
            parallelize_module(layer, mesh, fd.RowwiseParallel() if layer.in_features == 66 else fd.ColwiseParallel())


def test_uneven_cuts_are_refused(on_ranks):
    on_ranks(2, uneven)


def loses_a_rank(rank, world, where):
    mesh = init_device_mesh("cpu", (world,))
    model = nn.ModuleDict({"up": fw.nn.SemiSparseLinear(64, 128), "down": fw.nn.SemiSparseLinear(128, 64)})
    parallelize_module(model, mesh, {"up": fd.ColwiseParallel(), "down": fd.RowwiseParallel()})
    y = model["up"](torch.randn(3, 64, requires_grad=True))
    dist.barrier()
    if rank:
        os._exit(1)
    with pytest.raises(RuntimeError, match=r"parallel layer: group: expected every rank to make the same call .* got "):
        y.sum().backward() if where == "backward" else model["down"](y)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_death(on_ranks, where):
    on_ranks(2, loses_a_rank, where, dies=[1])


# Every module under fully_shard and DDP, with parameters of which some ranks have more, little or nothing


class SelfAttention(fw.nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def modules():
    """By name: a module, and the shape of an element of its input. The places of blocks are the same everywhere."""
    torch.manual_seed(5)
    layout = fw.BlockLayout([[1, 0, 1], [0, 1, 0]], block=16)
    places = torch.ones(3, 2, 3, 1)
    places[1, 0, 2] = 0
    convolution = fw.BlockLayout.for_conv2d(places, 8)
    transposable = fw.nn.SemiSparseLinear.from_dense(nn.Linear(16, 20), "transposable", "dense")
    return {
        "block": (fw.nn.BlockSparseLinear(48, 32, layout), (48,)),
        "kronecker": (fw.nn.KSLinear([(1, 5, 8, 4), (4, 4, 5, 1)]), (32,)),
        "2:4, values": (fw.nn.SemiSparseLinear(16, 5), (16,)),
        "2:4, dense": (fw.nn.SemiSparseLinear(16, 5, prune="magnitude", trainable="dense"), (16,)),
        "2:4, transposable": (transposable, (16,)),
        "convolution": (fw.nn.BlockSparseConv2d(16, 24, (3, 1), convolution, padding=(1, 0)), (16, 4, 3)),
        "attention": (SelfAttention(15, 3, P.sliding_window(7, 2, 1), num_kv_heads=1), (7, 15)),
    }


NAMES = list(modules())


def shared(model, way):
    """A model whose parameters are cut over ranks, whose gradients are averaged, or as it is."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return fully_shard(model) if way == "fully_shard" else model


def trained(rank, world, name, way):
    """Each rank has its part of the batch; the mean of the gradients is that of the whole."""
    single, shape = modules()[name]
    model = shared(copy.deepcopy(single), way)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    for _ in range(3):
        x = torch.randn(2 * world, *shape)
        rows = slice(2 * rank, 2 * rank + 2)
        assert_close(model(x[rows]), single(x[rows]), F32)
        for m, part, optimiser in zip((model, single), (x[rows], x), optimisers, strict=True):
            optimiser.zero_grad()
            m(part).square().mean().backward()
            optimiser.step()
    mine = sum(p.to_local().numel() if way == "fully_shard" else p.numel() for p in model.parameters())
    sizes = [None] * world
    dist.all_gather_object(sizes, mine)
    whole = sum(p.numel() for p in single.parameters())
    if way == "ddp":
        assert sizes == [whole] * world
    else:
        assert sum(sizes) == whole and (len(set(sizes)) > 1 or world != 3)  # three divide none of them


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", ["fully_shard", "ddp"])
@pytest.mark.parametrize("name", NAMES)
def test_training(on_ranks, name, way, world):
    on_ranks(world, trained, name, way)


# Distributed checkpoints of every module, which other numbers of ranks and other ways of sharing load


def saved(rank, world, folder, way):
    for n, (name, (model, shape)) in enumerate(modules().items()):
        torch.manual_seed(7)  # other weights than modules() gives, the same on every rank
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * (p != 0))
        x = torch.randn(3, *shape)
        want = model(x).detach()
        model = shared(model, way)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{n}")
        if rank == 0:
            torch.save((name, x, want), f"{folder}/{n}.pt")


def loaded(rank, world, folder, way):
    for n, (name, (model, _)) in enumerate(modules().items()):
        saved_name, x, want = torch.load(f"{folder}/{n}.pt")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model = shared(model, way)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=f"{folder}/{n}")
        set_model_state_dict(model, state)
        assert saved_name == name and torch.equal(model(x).detach(), want), name


@pytest.mark.parametrize("way", ["fully_shard", "ddp"])
def test_checkpoints(on_ranks, tmp_path, way):
    on_ranks(4, saved, str(tmp_path), way)
    for world, other in ((4, "fully_shard"), (3, "fully_shard"), (2, "ddp"), (1, "plain")):
        on_ranks(world, loaded, str(tmp_path), other)


# DTensors


def on_mesh(rank, world, t, *placements):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "heads"))
    return distribute_tensor(t.detach(), mesh, placements).requires_grad_(t.requires_grad)


def dtensors(rank, world):
    """Batch and heads cut at once, with patterns of each head and each element, bias, slopes, padding and sinks."""
    q, k, v = (torch.randn(2, h, 40, 8, requires_grad=True) for h in (4, 2, 2))
    both = [on_mesh(rank, world, t, Shard(0), Shard(1)) for t in (q, k, v)]
    four = [P.causal(40), P.full(40), P.strided(40, 5), P.sliding_window(40, 3, 3)]
    sinks, column = torch.randn(4, requires_grad=True), torch.randn(4, 1, 40, requires_grad=True)
    shared = [on_mesh(rank, world, t, Replicate(), Replicate()) for t in (sinks, column)]
    padding = torch.rand(2, 40) < 0.2
    slopes = torch.rand(4)
    for patterns, plain, cut in [
        (four[2], {}, {}),
        (four, dict(sinks=sinks), dict(sinks=shared[0])),
        ([four, four[::-1]], dict(bias=column), dict(bias=shared[1])),
        (four[0], dict(key_padding_mask=padding), dict(key_padding_mask=padding)),
        (four[0], dict(bias=fw.alibi(slopes)), dict(bias=fw.alibi(slopes))),
    ]:
        want, got = fw.attention(q, k, v, patterns, **plain), fw.attention(*both, patterns, **cut)
        assert got.placements == (Shard(0), Shard(1))
        assert_close(got.full_tensor(), want, F32)
        learns = [t for t in (sinks, column) if any(t is value for value in plain.values())]
        cut_learns = [t for t in shared if any(t is value for value in cut.values())]
        d = torch.randn_like(want)
        expected = torch.autograd.grad(want, [q, k, v, *learns], d)
        found = torch.autograd.grad(got, [*both, *cut_learns], on_mesh(rank, world, d, Shard(0), Shard(1)))
        for g, e in zip(found, expected, strict=True):
            assert_close(g.full_tensor(), e, F32)
    one = torch.randn(2, 3, 40, 8)
    with pytest.raises(RuntimeError, match="attention: placements: expected heads whose number 2 ranks divide, got 3"):
        fw.attention(*[on_mesh(rank, world, one, Shard(0), Shard(1))] * 3, four[0])
    with pytest.raises(RuntimeError, match=r"attention: k: expected Replicate\(\) or Shard\(0\).*, got S.*2"):
        k = on_mesh(rank, world, torch.randn(2, 2, 40, 8), Replicate(), Shard(2))
        fw.attention(on_mesh(rank, world, torch.randn(2, 2, 40, 8), Replicate(), Replicate()), k, k, four[0])
    with pytest.raises(NotImplementedError, match=r"attention: dropout_p: expected 0 on DTensors, got 0.5"):
        fw.attention(*both, four[0], dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="two_four_prune: arguments: expected plain tensors, got DTensors"):
        fw.two_four.prune(on_mesh(rank, world, torch.randn(8, 8), Shard(0), Replicate()))
    with pytest.raises(RuntimeError, match="attention: q: expected a plain tensor of this rank's rows, got a DTensor"):
        fd.attention(*both, four[0])


def test_dtensors(on_ranks):
    on_ranks(4, dtensors)


def device_keys(rank, world):
    """Masks, lists and selections of a batch, of heads or of all; documents."""
    mesh, both, whole = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)], [Replicate(), Replicate()]

    def check(op, operands, placements, result=both):
        plain = [t.clone().requires_grad_(t.is_floating_point()) for t in operands]
        cut = [distribute_tensor(t, mesh, p) for t, p in zip(operands, placements, strict=True)]
        cut = [t.requires_grad_(t.is_floating_point()) for t in cut]
        (got, got_lse), (want, lse) = op(*cut), op(*plain)
        assert list(got.placements) == result
        assert_close(got_lse.full_tensor().exp(), lse.exp(), F32)
        learns, plain = ([t for t in tensors if t.requires_grad] for tensors in (cut, plain))
        d = torch.randn_like(want)
        found = torch.autograd.grad(got, learns, distribute_tensor(d, mesh, result))
        for g, e in zip((got, *found), (want, *torch.autograd.grad(want, plain, d)), strict=True):
            assert_close(g.full_tensor(), e, F32)

    def blocked(q, k, v, *blocks, **options):
        given = fw.BlockLists(*blocks) if len(blocks) == 2 else blocks[0]
        return fw.attention(q, k, v, blocks=given, block=16, return_lse=True, **options)

    q, k, v = qkv = [torch.randn(4, h, 40, 8) for h in (8, 4, 4)]
    for shape in ((4, 8), (4, 4), (1, 4), (4, 1), (1, 1)):
        mask = torch.rand(*shape, 3, 3) < 0.6
        lists = [mask.sum(3, dtype=torch.int32), (~mask).int().argsort(3).int()]
        cut = [p if size > 1 else Replicate() for p, size in zip(both, shape, strict=True)]
        for placement in (cut, whole):
            check(blocked, [*qkv, mask], [both] * 3 + [placement])
            check(blocked, [*qkv, *lists], [both] * 3 + [placement] * 2)
    mask = torch.rand(4, 8, 3, 3) < 0.6
    learned = lambda q, k, v, mask, s, b: blocked(q, k, v, mask, pattern=P.causal(40), sinks=s, bias=b)  # noqa: E731
    of_heads = [Replicate(), Shard(0)]
    check(learned, [*qkv, mask, torch.randn(8), torch.randn(8, 40, 40)], [both] * 4 + [of_heads] * 2)
    one = [torch.randn(4, 1, 40, 8) for _ in range(2)]
    check(blocked, [q, *one, mask], [both, *[[Shard(0), Replicate()]] * 2, both])
    chosen = torch.rand(4, 4, 40, 3).argsort(3)[..., :2].int()
    check(lambda *a: fw.selected_attention(*a, block=16, return_lse=True), [*qkv, chosen], [both] * 4)
    check(lambda q, k, v: blocked(q, k, v, fw.select_blocks(q.detach(), k.detach(), 2, block=16)), qkv, [both] * 3)
    packed, heads = [t[0].transpose(0, 1).contiguous() for t in qkv], [Replicate(), Shard(1)]
    documents = lambda q, k, v, s: fw.varlen_attention(  # noqa: E731
        q, k, v, torch.tensor([0, 5, 30, 39]), causal=True, sinks=s, return_lse=True
    )
    check(documents, [*packed, torch.randn(8)], [heads] * 3 + [of_heads], heads)
    check(documents, [packed[0], *(t[:, :1] for t in packed[1:]), torch.randn(8)], [heads, whole, whole, whole], heads)
    for message, op, operands, placements in [
        (
            r"select_blocks: q: expected .*\(batch\), got S\(1\)",
            lambda q, k: fw.select_blocks(q, k, 2),
            (q, one[0]),
            both,
        ),
        (r"varlen_attention: q: expected .*\(heads\)", lambda t: documents(t, t, t, None), packed[:1], both),
        (
            r"attention: q: expected .*\(heads\), got S\(2\)",
            lambda t: blocked(t, k, v, mask),
            (q,),
            [Shard(2), Shard(1)],
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            op(*(distribute_tensor(t, mesh, placements if n == 0 else whole) for n, t in enumerate(operands)))


def test_device_keys(on_ranks):
    on_ranks(4, device_keys)


def one_head_of_keys(rank, world):
    """Queries are cut along heads beside whole keys, which get the sum of all gradients."""
    mesh, pattern = init_device_mesh("cpu", (world,)), P.strided(40, 5)
    width = fw.r_sddmm(torch.zeros(1, 1, 40, 8), torch.zeros(1, 1, 40, 8), pattern).shape[-1]
    q, k, v, x = (torch.randn(2, h, 40, d) for h, d in ((4, 8), (1, 8), (1, 8), (4, width)))
    for op, operands in [
        (lambda q, k, v: fw.attention(q, k, v, pattern), (q, k, v)),
        (lambda q, k, v: fw.attention(q, k, v, [pattern, P.causal(40)] * 2, sinks=torch.arange(4.0)), (q, k, v)),
        (lambda q, k: fw.r_sddmm(q, k, pattern), (q, k)),
        (lambda x, v: fw.r_spmm(x, v, pattern), (x, v)),
    ]:
        cut = [
            distribute_tensor(t, mesh, [Replicate() if n else Shard(1)]).requires_grad_()
            for n, t in enumerate(operands)
        ]
        plain = [t.clone().requires_grad_() for t in operands]
        got, want = op(*cut), op(*plain)
        assert got.placements == (Shard(1),)
        d = torch.randn_like(want)
        found = torch.autograd.grad(got, cut, distribute_tensor(d, mesh, [Shard(1)]))
        for g, e in zip((got, *found), (want, *torch.autograd.grad(want, plain, d)), strict=True):
            assert_close(g.full_tensor(), e, F32)


def test_one_head_of_keys(on_ranks):
    on_ranks(2, one_head_of_keys)


def other_ops(rank, world):
    mesh = init_device_mesh("cpu", (world,))

    def check(op, *tensors):
        cut = [
            distribute_tensor(t, mesh, [Shard(0) if n == 0 else Replicate()]).requires_grad_()
            for n, t in enumerate(tensors)
        ]
        plain = [t.clone().requires_grad_() for t in tensors]
        got, want = op(*cut), op(*plain)
        assert got.placements == (Shard(0),)
        d = torch.randn_like(want)
        for g, e in zip(
            (got, *torch.autograd.grad(got, cut, distribute_tensor(d, mesh, [Shard(0)]))),
            (want, *torch.autograd.grad(want, plain, d)),
            strict=True,
        ):
            assert_close(g.full_tensor(), e, F32)

    layout = fw.BlockLayout(torch.ones(2, 3).int(), block=16)
    s = fw.two_four.compress(fw.two_four.prune(torch.randn(12, 32)))
    check(lambda x: fw.two_four.linear(x, s), torch.randn(6, 32))
    check(
        lambda x, a, b: fw.ksmm_chain(x, [a, b]), torch.randn(5, 12), torch.randn(3, 2, 4, 1), torch.randn(1, 4, 6, 1)
    )
    check(lambda x: layout.unpack(x), torch.randn(3, 6, 16, 16))
    check(lambda x: layout.pack(x), torch.randn(3, 1, 32, 48))
    convolution = fw.BlockLayout.for_conv2d(torch.ones(2, 1, 3, 3).int(), 8)
    check(lambda x, w: fw.block_conv2d(x, w, convolution, 3), torch.randn(4, 8, 6, 6), torch.randn(18, 8, 8))


def test_other_ops_on_dtensors(on_ranks):
    on_ranks(2, other_ops)


def cut_rows(rank, world):
    """Any dimension but that of features, in uneven parts."""
    mesh = init_device_mesh("cpu", (world,))
    layout = fw.BlockLayout([[1, 0, 1], [0, 1, 1]], block=16)
    first, second = torch.randn(2, 4, 3, 2), torch.randn(1, 5, 4, 4)  # 12 features, 16, 20
    values = torch.randn(layout.nnz, 16, 16)

    def check(op, x, dim, into=None):
        cut, plain = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_(), x.clone().requires_grad_()
        got, want = op(cut), op(plain)
        assert got.placements == (Shard(dim if into is None else into),)
        d = torch.randn_like(want)
        (g,) = torch.autograd.grad(got, cut, distribute_tensor(d, mesh, got.placements))
        assert_close(got.full_tensor(), want, F32)
        assert_close(g.full_tensor(), torch.autograd.grad(want, plain, d)[0], F32)

    for dim in (0, 1):
        x = torch.randn(5, 7, 12)
        check(lambda x: fw.ksmm(x, first, activation="gelu"), x, dim)
        check(lambda x: fw.ksmm_chain(x, [first, second]), x, dim)
        check(lambda x: fw.ksmm(x, first, bs_last=True), x.movedim(-1, 0).contiguous(), dim + 1)
        check(lambda x: fw.dds(x, values, layout, trans_b=True), torch.randn(5, 7, 48), dim)
    check(lambda x: fw.dsd(values, x, layout), torch.randn(48, 7), 1)
    check(lambda x: fw.dsd(values, x, layout, trans_b=True), torch.randn(7, 48), 0, into=1)
    with pytest.raises(RuntimeError, match=r"dds: a: expected Replicate\(\) or Shard\(0\) \(rows\), got "):
        fw.dds(distribute_tensor(torch.randn(7, 48), mesh, [Shard(1)]), values, layout, trans_b=True)
    layer = fw.nn.BlockSparseLinear(48, 32, layout)
    plain, shape = copy.deepcopy(layer), (5, 7, 48)
    distribute_module(layer, mesh)
    x = torch.randn(shape)
    for dim in (0, 1):
        y, want = layer(distribute_tensor(x, mesh, [Shard(dim)])), plain(x)
        assert y.placements == (Shard(dim),)
        assert_close(y.full_tensor(), want, F32)
        y.full_tensor().square().sum().backward()
        want.square().sum().backward()
        for cut, whole in zip(layer.parameters(), plain.parameters(), strict=True):
            assert_close(cut.grad.full_tensor(), whole.grad, F32)


@pytest.mark.parametrize("world", [2, 3])
def test_rows_of_dtensors(on_ranks, world):
    on_ranks(world, cut_rows)
