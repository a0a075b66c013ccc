"""Random 2:4 products against float64.

    export PYTHONPATH=python:tests/support
    python tests/two_four/soak_two_four.py [--count 20000] [--seed S] [--device cuda] [--seconds 0]

Draws sizes, type, side, words, the strides of every operand and of the incoming gradient, batch, bias, activation,
scales and the result's type; every fifth problem is differentiated too. What no product reads is NaN. See soak.py.
"""

import math
import random
from dataclasses import dataclass

import soak
import torch
import torch.nn.functional as F
from torch import Tensor

import fretwork as fw

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = [
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "tf32x3"),
    (torch.int8, None),
    (torch.uint8, None),
    *((dtype, None) for dtype in FP8),
]
INTEGERS = (torch.int8, torch.uint8)
WORDS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
NARROW = (torch.int8, *FP8)
OUTS = (None, None, torch.float32, torch.float16, torch.bfloat16, *NARROW)
ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
# Rounding of a result, and what a sum may be off by for each of its terms, which are at most about 1.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23, torch.int32: 0.0,
            torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 0.0}  # fmt: skip
# Half of a step that is the same everywhere, or near zero.
STEP = {torch.int8: 0.5, torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}
TERM = {"ieee": 3e-7, "tf32": 1.1e-3, "tf32x3": 1e-6}


@dataclass
class Problem:
    number: int
    m: int
    k: int
    n: int
    batch: tuple[int, ...]
    left: bool
    dtype: torch.dtype
    precision: str | None
    out: torch.dtype | None
    word: torch.dtype
    strides: str
    values: str
    bias: bool
    activation: str | None
    scales: str
    scale_out: bool
    gradient: str
    backward: bool


def views(rank: int) -> tuple[str, ...]:
    """How `laid_out` can show a tensor of so many dimensions."""
    turned = ("turned",) if rank > 1 else ()
    return ("plain", *turned, "padded", "offset", "every second", *(f"expanded {d}" for d in range(rank)))


def draw(number: int, seed: int) -> Problem:
    r = random.Random(f"{seed} {number}")

    def size(most: int) -> int:
        """Small sizes, round ones and those beside them."""
        near = 2 ** r.randint(0, most.bit_length() - 1) * r.choice((1, 1, 3)) + r.choice((0, 0, 0, 1))
        return r.choice((r.randint(1, most), min(near, most)))

    dtype, precision = r.choice(KINDS)
    k = 4 * size(300) if r.random() < 0.7 else 128 * r.randint(1, 10)
    floating = dtype in (torch.float16, torch.bfloat16, torch.float32)
    out = r.choice(OUTS)
    plain = dtype in INTEGERS and out is None
    backward = number % 5 == 0 and floating and out not in NARROW
    batch = r.choice(((), (), (), (2,), (3, 2), (1,)))

    def view(rank: int) -> str:
        return "plain" if r.random() < 0.5 else r.choice(views(rank))

    return Problem(
        number, size(600), k, r.choice((r.randint(1, 64), size(300), 8 * r.randint(1, 40))),
        batch, r.random() < 0.5, dtype, precision, out, r.choice(WORDS), view(len(batch) + 2), view(2),
        not plain and r.random() < 0.5,
        None if plain else r.choice((None, None, "gelu", "silu") if backward else (None, None, *ACTIVATIONS)),
        "none" if plain or backward else r.choice(("none", "none", "one", "each")),
        not plain and r.random() < (0.5 if out in NARROW else 0.1), view(len(batch) + 2), backward,
    )  # fmt: skip


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers with other strides, and something else between them; expanded, those of the first index."""
    if how.startswith("expanded"):
        d = int(how.split()[1])
        return t.narrow(d, 0, min(1, t.shape[d])).expand(t.shape) if t.shape[d] else t
    if how == "turned":
        return t.mT.contiguous().mT
    before, after, step = {
        "padded": (0, 16 // t.element_size(), 1), "offset": (1, 2, 1), "every second": (0, 0, 2)
    }.get(how, (0, 0, 1))  # fmt: skip
    if before + after == 0 and step == 1:
        return t
    wide = torch.empty(*t.shape[:-1], before + step * t.shape[-1] + after, dtype=t.dtype, device=t.device)
    wide.view(torch.uint8).fill_(0x7F)  # NaN, or a large number
    inner = wide[..., before : before + step * t.shape[-1] : step]
    inner.copy_(t)
    return inner


def numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype in INTEGERS or dtype == torch.int32:
        return torch.randint(0 if dtype == torch.uint8 else -7, 8, shape, device=device).to(dtype)
    return (torch.rand(shape, device=device) * 2 - 1).to(dtype)


def excess(got: Tensor, want: Tensor, terms: int, problem: Problem, scale: float = 1.0) -> Tensor:
    """By how much the worst element is beyond what rounding explains; above 1 is wrong, and so is NaN."""
    if not got.numel():
        return want.new_zeros(())
    if problem.dtype in INTEGERS:
        term = 1e-9 if got.dtype == torch.int32 else 2e-5
    else:
        # The tensor cores keep about 14 bits when they add products of fp8.
        term = 1e-4 if problem.dtype in FP8 else TERM[problem.precision or "ieee"]
    if got.dtype in NARROW:
        info = torch.iinfo(got.dtype) if got.dtype == torch.int8 else torch.finfo(got.dtype)
        want = want.clamp(info.min, info.max)
    slack = scale * term * (0.5 * terms + 4 * math.sqrt(terms) + 1) + 1e-6
    allowed = (ROUNDING[got.dtype] * 1.05 + 3e-5) * want.abs() + STEP.get(got.dtype, 0.0) + 1.3 * slack
    return ((got.double() - want).abs() / allowed).nan_to_num(math.inf).amax()


def run(problem: Problem, seed: int, device: torch.device) -> dict[str, Tensor]:
    p = problem
    torch.manual_seed(seed * 1_000_003 + p.number)
    dense = numbers((p.m, p.k), p.dtype, device)
    kept = fw.two_four.prune(dense)
    s = fw.two_four.compress(kept, metadata_dtype=p.word, validate=p.number % 7 == 0)
    if p.values != "plain":
        s = fw.two_four.from_parts(laid_out(s.values, p.values), laid_out(s.metadata, p.values), s.dim)
        kept = fw.two_four.from_parts(s.values.contiguous(), s.metadata.contiguous(), s.dim).to_dense()
    x = numbers((*p.batch, p.k, p.n) if p.left else (*p.batch, p.n, p.k), p.dtype, device)
    given = laid_out(x, p.strides)
    out = p.out or {**dict.fromkeys(INTEGERS, torch.int32), **dict.fromkeys(FP8, torch.bfloat16)}.get(p.dtype, p.dtype)
    kind = torch.float32 if out in NARROW and p.number % 2 else out
    bias = laid_out(numbers((p.m,), kind, device), "every second" if p.number % 3 == 0 else "plain") if p.bias else None
    scale_out = torch.tensor(1.5, device=device) if p.scale_out else None
    scales = {"none": (None, None), "one": (torch.tensor(0.5, device=device), None),
              "each": tuple(torch.rand(size, device=device) + 0.2 for size in (p.m, p.n))}[p.scales]  # fmt: skip
    wide, wide_x, wide_bias = kept.double(), given.double(), None if bias is None else bias.double()
    leaves: dict[str, tuple[Tensor, Tensor]] = {}
    if p.backward:
        leaves["d_x"] = given.detach().requires_grad_(), wide_x.requires_grad_()
        given = leaves["d_x"][0]
        if bias is not None and wide_bias is not None:
            leaves["d_bias"] = bias, wide_bias = bias.detach().requires_grad_(), wide_bias.requires_grad_()
    by_sparse, by_dense = scales
    options = {"bias": bias, "activation": p.activation, "out_dtype": p.out, "precision": p.precision}
    options["scale_out"] = scale_out
    if p.left:
        got = fw.two_four.matmul(s, given, scale_a=by_sparse, scale_b=by_dense, **options)
        want = wide @ wide_x
    else:
        got = fw.two_four.matmul(given, s.T, scale_a=by_dense, scale_b=by_sparse, **options)
        want = wide_x @ wide.T
    for scale, of_rows in ((by_sparse, p.left), (by_dense, not p.left)):
        want = (
            want if scale is None else want * (scale.double()[:, None] if of_rows and scale.dim() else scale.double())
        )
    if wide_bias is not None:
        want = want + (wide_bias[:, None] if p.left else wide_bias)
    want = ACTIVATIONS[p.activation](want) * (1.5 if p.scale_out else 1.0)
    assert got.shape == want.shape and got.dtype == out, problem
    worst = {"result": excess(got.detach(), want.detach(), p.k // 2, problem)}
    if p.backward:
        upstream = laid_out(torch.rand(want.shape, device=device).to(out), p.gradient)
        ours = torch.autograd.grad(got, [t for t, _ in leaves.values()], upstream)
        exact = torch.autograd.grad(want, [e for _, e in leaves.values()], upstream.double())
        # Gradients pass a rounding to the type in the middle, where an activation has one of its own, and the dense
        # products that they are may add up parts in the type.
        scale_ = 1.0 + 6 * max(ROUNDING[p.dtype], ROUNDING[out]) / TERM[p.precision or "ieee"]
        terms = max(p.m, p.n * math.prod(p.batch)) + p.k
        for name, one, other in zip(leaves, ours, exact, strict=True):
            worst[name] = excess(one, other, terms, problem, scale_)
    return worst


if __name__ == "__main__":
    soak.main(__doc__, draw, run)
