"""2:4 operators on views of every kind: expanded, permuted, cut out of NaN, misaligned, every other element.

The result, and every gradient, is that of contiguous copies. `soak_two_four` draws views too, against float64.
"""

import random

import pytest
import torch
from conftest import TOLERANCE, dtypes_of
from soak_two_four import laid_out, views

import fretwork as fw
from fretwork import two_four

BYTES = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


def close(got, want, dtype, what):
    """Other strides may choose another kernel, which adds in another order."""
    got, want = got.double(), want.double()
    largest = float(want.abs().amax()) if want.numel() else 0.0
    allowed = TOLERANCE[torch.bfloat16 if dtype in BYTES else dtype] * largest + 1e-12
    assert got.shape == want.shape and bool(((got - want).abs() <= allowed).all()), what


def numbers(dtype, *shape):
    if dtype in (torch.int8, torch.uint8):
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape).to(dtype)
    return torch.randn(shape).to(dtype)


def kinds(device):
    return [*dtypes_of(device), *BYTES]


class Product:
    """A product of random sizes and types, and its operands, each shown in some way."""

    def __init__(self, r, device):
        self.dtype, self.left, self.shown = r.choice(kinds(device)), r.random() < 0.5, []
        self.learns = self.dtype in dtypes_of(device)
        self.out = None if self.learns else torch.float32
        self.activation, self.precision = r.choice((None, "gelu", "relu")), r.choice(("ieee", "tf32"))
        self.m, self.n, self.k = m, n, k = (
            r.choice((1, 5, 64, 72, 130)), r.choice((1, 3, 8, 16, 40, 64, 136)), r.choice((4, 36, 64, 128, 256, 512))
        )  # fmt: skip
        batch, result = r.choice(((), (), (2,), (3, 2))), self.out or self.dtype

        def view(t):
            self.shown.append(r.choice(views(t.dim())))
            return laid_out(t.to(device), self.shown[-1])

        pruned, word = two_four.prune(numbers(self.dtype, m, k)), r.choice((torch.int8, torch.int16, torch.uint32))
        s = two_four.compress(pruned, metadata_dtype=word)
        self.operands = {
            "values": view(s.values),
            "metadata": view(s.metadata),
            "dense": view(numbers(self.dtype, *batch, *((k, n) if self.left else (n, k)))),
            "bias": view(numbers(result, m)) if r.random() < 0.5 else None,
            "scale_a": view(torch.rand(m if self.left else n) + 0.5) if r.random() < 0.3 else None,
            "scale_b": view(torch.rand(n if self.left else m) + 0.5) if r.random() < 0.3 else None,
            "upstream": view(numbers(result, *batch, *((m, n) if self.left else (n, m)))),
        }

    def run(self, values, metadata, dense, bias, scale_a, scale_b, upstream):
        """The result and the gradients of values, dense and bias."""
        leaves = [t if t is None else t.detach() for t in (values, dense, bias)]
        for t in leaves if self.learns else ():
            if t is not None:
                t.requires_grad_()
        values, dense, bias = leaves
        s = two_four.from_parts(values, metadata, 1)
        a, b = (s, dense) if self.left else (dense, s.T)
        options = {"scale_a": scale_a, "scale_b": scale_b, "precision": self.precision}
        c = two_four.matmul(a, b, bias, self.activation, self.out, **options)
        inputs = [t for t in leaves if t is not None]
        return [c.detach(), *(torch.autograd.grad(c, inputs, upstream) if self.learns else ())]


@pytest.mark.parametrize("number", range(6))
def test_products_of_views(number, device):
    """Values, words, the dense operand, bias, scales and the incoming gradient."""
    r = random.Random(torch.initial_seed())
    for _ in range(12):
        p = Product(r, device)
        got = p.run(**p.operands)
        want = p.run(**{name: t if t is None else t.contiguous().clone() for name, t in p.operands.items()})
        loose = torch.float16 if p.dtype == torch.float32 and p.precision == "tf32" else p.dtype
        for one, other in zip(got, want, strict=True):
            close(one, other, loose, (p.dtype, p.left, (p.m, p.k, p.n), p.activation, p.precision, p.shown))


@pytest.mark.parametrize("how", views(2))
def test_tools_on_views(how, device):
    """What makes and undoes the form gives the same bits for a view as for a copy of it, and both gradients too."""
    for dtype in kinds(device):
        for dim, (rows, cols) in [(1, (24, 48)), (0, (48, 24)), (1, (68, 260)), (0, (8, 64))]:
            dense = laid_out(numbers(dtype, rows, cols).to(device), how)
            copy = dense.contiguous()

            def same(one, other, what=(dtype, dim, how)):
                assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), what

            pruned = two_four.prune(copy, dim)
            same(two_four.prune(dense, dim), pruned)
            same(two_four.prune(dense, dim, transposable=True), two_four.prune(copy, dim, transposable=True))
            assert two_four.check(dense, dim) == two_four.check(copy, dim)
            s, held = two_four.compress(pruned, dim), laid_out(pruned, how)
            if not how.startswith("expanded"):
                t = two_four.compress(held, dim)
                same(t.values, s.values)
                same(t.metadata, s.metadata)
            values, words = laid_out(s.values, how), laid_out(s.metadata, how)
            both = two_four.from_parts(values.contiguous(), words.contiguous(), s.dim)
            same(two_four.from_parts(values, words, s.dim).to_dense(), both.to_dense())
            t = fw.TwoFour(values, words, dim)
            same(t.metadata, fw.TwoFour(both.values, both.metadata, dim).metadata)
            gather = torch.ops.fretwork.two_four_gather
            same(gather(dense, words, dim), gather(copy, both.metadata, dim))
            for pair in zip(
                torch.ops.fretwork.two_four_prune_both(dense, torch.int16),
                torch.ops.fretwork.two_four_prune_both(copy, torch.int16),
                strict=True,
            ):
                same(*pair)


@pytest.mark.parametrize("trainable", ["values", "dense"])
@pytest.mark.parametrize("how", views(3))
def test_layers_on_views(how, trainable, device):
    """x and the gradient of y, as a sum or a mean over some of its dimensions gives it."""
    dense = torch.nn.Linear(64, 48, device=device)
    layer = fw.nn.SemiSparseLinear.from_dense(dense, prune="magnitude", trainable=trainable)
    x = laid_out(torch.randn(3, 7, 64, device=device), how)
    upstream = laid_out(torch.randn(3, 7, 48, device=device), how)
    results = []
    for given, incoming in ((x, upstream), (x.contiguous().clone(), upstream.contiguous().clone())):
        given = given.detach().requires_grad_()
        layer.zero_grad()
        y = layer(given)
        y.backward(incoming)
        results.append([y.detach(), given.grad, *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        close(one, other, torch.float32, (how, trainable))
