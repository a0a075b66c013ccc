"""Random Kronecker products against the `dense` algo in float64, on the device itself.

    export PYTHONPATH=python:tests/support
    python tests/kronecker/soak_kronecker.py [--count 20000] [--seed S] [--device cuda] [--seconds 0]

Draws (a, b, c, d), batch, layout, type, precision, strides, bias and activation; every fourth problem is differentiated
too. One in forty has blocks of up to 1024 and batches of up to 4096, another one in forty is a Monarch chain of two
factors, which some GPUs run as one kernel. What no product reads is NaN. Errors stay on the device and are looked at
once per few hundred problems, so that nothing waits for the GPU. The seed of the run and the number of a problem repeat
it: --seed S --only N.
"""

import math
import random
from dataclasses import dataclass

import soak
import torch
from torch import Tensor

import fretwork as fw

KINDS = [
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "tf32x3"),
]
# Rounding of a result, and what a sum may be off by for each of its terms, which are below 1.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
TERM = {None: 3e-7, "ieee": 3e-7, "tf32": 1.1e-3, "tf32x3": 1e-6}
MOST_DENSE, MOST_WEIGHTS = 1 << 20, 1 << 18
LARGE, MOST_BATCH, RARE = 1024, 4096, 40


@dataclass
class Problem:
    number: int
    sizes: tuple[int, int, int, int]
    batch: int
    bs_last: bool
    dtype: torch.dtype
    precision: str | None
    x_strides: str
    w_strides: str
    bias: bool
    activation: str | None
    backward: bool
    second: tuple[int, int, int, int] | None = None  # another factor, applied after the first


def draw(number: int, seed: int) -> Problem:
    random_ = random.Random(f"{seed} {number}")

    def size(most: int) -> int:
        """Small sizes, round ones and those beside them."""
        near = 2 ** random_.randint(0, most.bit_length() - 1) * random_.choice((1, 1, 3)) + random_.choice((0, 0, 0, 1))
        return random_.choice((random_.randint(1, most), min(near, most)))

    kind = random_.randrange(RARE)
    if kind == 0:
        return monarch(number, random_)
    side = LARGE if kind == 1 else 200
    while True:
        a, b, c, d = size(12), size(side), size(side), size(64)
        weights = MOST_DENSE if kind == 1 else MOST_WEIGHTS
        if a * b * d * a * c * d <= MOST_DENSE and a * b * c * d <= weights and (kind != 1 or max(b, c) > 200):
            break
    dtype, precision = random_.choice(KINDS)
    batch = random_.choice((1, random_.randint(0, 40), random_.randint(2, 300), 8 * random_.randint(1, 60)))
    batch = random_.randint(1, MOST_BATCH) if kind == 1 else batch
    strides = ("plain", "plain", "padded", "offset", "turned", "every second")
    backward = number % 4 == 0
    # Where a sum next to zero falls on the other side, relu's gradient is another: it is left to exact tests.
    activations = (None, None, "gelu", "silu") if backward else (None, None, "relu", "gelu", "silu")
    return Problem(
        number, (a, b, c, d), batch, random_.random() < 0.5, dtype, precision, random_.choice(strides),
        random_.choice((*strides, "matrices")), random_.random() < 0.5, random_.choice(activations), backward,
    )  # fmt: skip


def monarch(number: int, random_: random.Random) -> Problem:
    """Two factors in 16 bits that fit, mostly of sizes that can be fused."""
    q, r, s, p = (random_.choice((16, 32, 32, 64, 64, 8 * random_.randint(1, 8), 20)) for _ in range(4))
    dtype, batch = random_.choice((torch.float16, torch.bfloat16)), random_.randint(1, 600)
    activation = random_.choice((None, "relu", "gelu", "silu"))
    return Problem(number, (q, s, r, 1), batch, random_.random() < 0.2, dtype, None, "plain", "plain",
                   random_.random() < 0.5, activation, False, (1, p, q, s))  # fmt: skip


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers with other strides; NaN between them."""
    nan = float("nan")
    if how == "padded":
        return torch.nn.functional.pad(t, (0, 8), value=nan)[..., :-8]
    if how == "offset":
        return torch.nn.functional.pad(t, (1, 2), value=nan)[..., 1:-2]
    if how == "turned":  # the weights of a gradient, or the other layout of x
        return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() == 4 else t.T.contiguous().T
    if how == "every second":
        return torch.stack([t, torch.full_like(t, nan)], -1).flatten(-2)[..., ::2]
    if how == "matrices":
        return t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return t


def of_sums(problem: Problem, terms: int, scale: float = 1.0) -> float:
    """What sums of so many products may be off by, before they are rounded."""
    return 1.2 * (scale * TERM[problem.precision] * (0.5 * terms + 4 * math.sqrt(terms) + 1) + 1e-6)


def excess(
    got: Tensor, want: Tensor, problem: Problem, terms: int, scale: float = 1.0, more: float | Tensor = 0.0
) -> Tensor:
    """By how much the worst element is beyond what rounding explains; above 1 is wrong, and so is NaN."""
    allowed = (ROUNDING[problem.dtype] * 1.05 + 3e-5) * want.abs() + of_sums(problem, terms, scale) + 1.2 * more
    return ((got.double() - want).abs() / allowed).nan_to_num(math.inf).amax() if got.numel() else want.new_zeros(())


def run_chain(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """Against both factors in float64, rounded to the type between them as a chain is."""
    first, second = problem.sizes, problem.second or problem.sizes
    shape = (problem.batch, first[0] * first[2])
    shapes = (shape[::-1] if problem.bs_last else shape, first, second, (second[1] * second[3],))
    x, *weights, bias = ((torch.rand(s, device=device) * 2 - 1).to(problem.dtype) for s in shapes)
    weights = [w / w.shape[2] ** 0.5 for w in weights]
    rest = (problem.bs_last, bias if problem.bias else None, problem.activation)
    got = fw.ksmm_chain(x, weights, *rest, "kernel")
    middle = fw.ksmm(x.double(), weights[0].double(), problem.bs_last, algo="einsum").to(problem.dtype).double()
    offset = bias.double() if problem.bias else None
    want = fw.ksmm(middle, weights[1].double(), problem.bs_last, offset, problem.activation, "einsum")
    assert got.shape == want.shape and got.dtype == problem.dtype, problem
    # A middle element next to the point where rounding turns may fall on either side: two of them, with large weights.
    turned = 4 * ROUNDING[problem.dtype] * middle.abs().amax() / second[2] ** 0.5
    return {"result": excess(got, want, problem, second[2], more=turned)}


def run(problem: Problem, seed: int, device: torch.device) -> dict[str, Tensor]:
    """The excess of the result, and of the gradients where they are asked for."""
    torch.manual_seed(seed * 1_000_003 + problem.number)
    if problem.second is not None:
        return run_chain(problem, device)
    a, b, c, d = problem.sizes
    shape = (problem.batch, a * c * d)
    x, w = (torch.rand(s, device=device) * 2 - 1 for s in (shape[::-1] if problem.bs_last else shape, problem.sizes))
    bias = torch.rand(a * b * d, device=device) * 2 - 1 if problem.bias else None
    inputs = [None if t is None else t.to(problem.dtype) for t in (x, w, bias)]
    wide = [None if t is None else t.double() for t in inputs]
    inputs[0], inputs[1] = laid_out(inputs[0], problem.x_strides), laid_out(inputs[1], problem.w_strides)
    leaves = [t.requires_grad_() for t in inputs if t is not None and problem.backward]
    got = fw.ksmm(inputs[0], inputs[1], problem.bs_last, inputs[2], problem.activation, "kernel", problem.precision)
    sums = fw.ksmm(wide[0], wide[1], problem.bs_last, wide[2], None, "dense")
    want = activated(problem, sums)
    assert got.shape == want.shape and got.dtype == problem.dtype, problem
    worst = {"result": excess(got.detach(), want, problem, c)}
    if problem.backward:
        upstream = torch.rand(want.shape, device=device).to(problem.dtype)
        ours = torch.autograd.grad(got, leaves, upstream)
        d_sums, off = gradient_of_sums(problem, sums, upstream.double())
        exact = gradients(problem, wide, d_sums)
        moved = gradients(problem, [None if t is None else t.abs() for t in wide], off)
        for name, one, other, more, terms in zip(
            ("d_x", "d_w", "d_bias"), ours, exact, moved, (b, problem.batch, problem.batch), strict=False
        ):
            worst[name] = excess_of_gradient(one, other, problem, terms, more)
    return worst


def activated(problem: Problem, sums: Tensor) -> Tensor:
    return sums if problem.activation is None else getattr(torch.nn.functional, problem.activation)(sums)


def gradients(problem: Problem, inputs: list[Tensor | None], d_sums: Tensor) -> tuple[Tensor, ...]:
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    sums = fw.ksmm(leaves[0], leaves[1], problem.bs_last, leaves[2], None, "dense")
    return torch.autograd.grad(sums, [t for t in leaves if t is not None], d_sums)


def gradient_of_sums(problem: Problem, sums: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """In the middle between what it may be, and how far it may be from there.

    With 16 bits an activation's slope is taken of sums rounded to the type, and rounded to it again. Both give one
    number, or two neighbours where the sums' own error leaves open to which side they fall.
    """
    if problem.activation is None:
        return upstream, torch.zeros_like(upstream)

    def slope(of: Tensor) -> Tensor:
        of = of.detach().requires_grad_()
        return torch.autograd.grad(activated(problem, of).sum(), of)[0]

    if problem.dtype == torch.float32:  # excess_of_gradient has it
        return upstream * slope(sums), torch.zeros_like(upstream)
    error = of_sums(problem, problem.sizes[2]) + 1e-5 * sums.abs()
    ends = torch.stack([sums - error, sums + error]).to(problem.dtype).double()
    slopes = slope(ends)
    # Between two sums a slope leaves the chord by an eighth of the square of their distance and its second derivative,
    # which is below 0.8. It is reckoned in fp32.
    beside = 0.1 * (ends[1] - ends[0]) ** 2 + 2e-6
    low, high = (
        (upstream * end).to(problem.dtype).double() for end in (slopes.amin(0) - beside, slopes.amax(0) + beside)
    )
    return (low + high) / 2, (high - low) / 2


def excess_of_gradient(got: Tensor, want: Tensor, problem: Problem, terms: int, more: Tensor) -> Tensor:
    """Of an activation, whose slope is at most 1.13. With fp32 it meets sums that are off already, so that the depth of
    both products counts."""
    if problem.activation is None:
        return excess(got, want, problem, terms)
    if problem.dtype != torch.float32:
        return excess(got, want, problem, terms, 1.13, more)
    scale = 1.0 + 6 * ROUNDING[problem.dtype] / TERM[problem.precision]
    return excess(got, want, problem, terms + problem.sizes[2], scale)


if __name__ == "__main__":
    soak.main(__doc__, draw, run)
