"""Random attention over keys known only on the device against dense float64 attention, on the device itself.

    export PYTHONPATH=python:tests/support
    python tests/dynamic_attention/soak_dynamic_attention.py [--count 10000] [--seed S] [--device cuda] [--seconds 0]

Draws one of four kinds (a mask or lists of key blocks, selected blocks, packed documents), sizes, head groups, types,
views, patterns, windows, sinks and options; three of four problems are differentiated too, and every eighth runs twice
for the same bits. Lists have garbage behind their counts, selections numbers out of range, documents rows outside of
all, and what lies between the rows of a view, and keys that no query sees, are NaN. The seed of the run and the number
of a problem repeat it: --seed S --only N.
"""

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import soak
import torch
from torch import Tensor

import fretwork as fw

KINDS = ("mask", "lists", "selected", "varlen")
TYPES = [(torch.float16, None), (torch.bfloat16, None), (torch.float32, "ieee"), (torch.float32, "tf32")]
STRIDES = ("plain", "heads inside", "padded", "offset", "every second")
PATTERNS = (None, "causal", "window", "prefix", "local", "block causal", "documents", "causal window", "full")
# Rounding of a result or of an operand, and what a score is off by for each unit of the products that it sums.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
SCORE = {None: 1e-6, "ieee": 1e-6, "tf32": 2.0**-10}
MOST_SCORES, LARGE, HUGE = 1 << 20, 12, 150  # of a problem; one in so many is large, or huge


@dataclass
class Problem:
    number: int
    kind: str
    batch: int
    heads: tuple[int, int]
    seq: tuple[int, int]
    dims: tuple[int, int]
    block: tuple[int, int]
    lists: tuple[int, int]  # batch and heads of the mask or lists
    density: float
    entries: int
    pattern: str | None
    causal: bool
    window: tuple[int | None, int | None]
    bounded: bool  # max_q and max_k are given
    dtype: torch.dtype
    precision: str | None
    sinks: str | None
    scale: float | None
    softcap: float
    bias: tuple[bool, bool, bool, bool] | None  # which sizes are not 1
    slopes: bool
    padding: bool
    strides: tuple[str, ...] = field(default_factory=tuple)  # of q, k, v and the upstream gradient
    backward: bool = True
    twice: bool = False


def draw(number: int, seed: int) -> Problem:
    random_ = random.Random(f"{seed} {number}")
    coin = lambda share: random_.random() < share  # noqa: E731
    kind = random_.choice(KINDS)
    large, huge = number % LARGE == 0, number % HUGE == HUGE - 1
    dtype, precision = random_.choice(TYPES)
    side = (16, 32, 64, 128)
    heads_k = random_.choice((1, 1, 2, 3))
    heads = (heads_k * random_.choice((1, 1, 2, 3, 4, 8, 16)), heads_k)
    batch = 1 if kind == "varlen" else random_.choice((1, 1, 2, 3))

    def size(most: int) -> int:
        near = random_.choice((1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 256, 300))
        return min(random_.choice((random_.randint(1, most), near)), most)

    while True:
        most = 4096 if huge else 1024 if large else 320
        seq = (random_.randint(1025, most), random_.randint(1025, most)) if huge else (size(most), size(most))
        if coin(0.3):
            seq = (seq[0], seq[0])
        if huge:
            batch, heads = 1, (2 * heads_k, heads_k)
        if batch * heads[0] * seq[0] * seq[1] <= MOST_SCORES * (64 if huge else 4 if large else 1):
            break
    regular = random_.choice((16, 32, 64, 64, 96, 128, 128, 192, 256))
    dims = (regular, regular) if coin(0.6) else (random_.randint(1, 160), random_.randint(1, 160))
    block = (random_.choice(side), random_.choice(side))
    if coin(0.5):
        block = (block[0], block[0])
    pattern = random_.choice(PATTERNS) if kind in ("mask", "lists") else None
    if pattern == "documents":
        seq = (seq[0], seq[0])
    options = kind in ("mask", "lists") and coin(0.4)
    biased = options and coin(0.5)
    window = tuple(None if coin(0.6) else random_.choice((0, 1, 7, 30, 64, 200)) for _ in range(2))
    return Problem(
        number, kind, batch, heads, seq, dims, block,
        lists=(random_.choice((1, batch)), random_.choice((1, *heads))),
        density=random_.choice((0.0, 0.1, 0.3, 0.6, 0.9, 1.0)),
        entries=0 if coin(0.02) else random_.randint(1, 8),
        pattern=pattern, causal=coin(0.6), window=(window[0], window[1]), bounded=coin(0.5),
        dtype=dtype, precision=precision if kind in ("mask", "lists") or precision != "tf32" else "ieee",
        sinks=random_.choice((None, None, "own", "float32")),
        scale=random_.choice((None, None, None, 0.3, -0.2)),
        softcap=random_.choice((0.0, 0.0, 5.0)) if options else 0.0,
        bias=tuple(coin(0.5) for _ in range(4)) if biased else None,  # type: ignore[arg-type]
        slopes=options and not biased and coin(0.4), padding=options and coin(0.4),
        strides=tuple(random_.choice(STRIDES) for _ in range(4)),
        backward=number % 4 != 3, twice=number % 8 == 0,
    )  # fmt: skip


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers with other strides; NaN between them."""
    nan = math.nan
    if how == "heads inside":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "padded":
        return torch.nn.functional.pad(t, (0, 8), value=nan)[..., :-8]
    if how == "offset":
        return torch.nn.functional.pad(t, (1, 2), value=nan)[..., 1:-2]
    if how == "every second":
        return torch.stack([t, torch.full_like(t, nan)], -1).flatten(-2)[..., ::2]
    return t


def pattern_of(problem: Problem) -> fw.Pattern | None:
    rows, cols = problem.seq
    small = max(min(rows, cols) // 3, 1)
    patterns = fw.patterns
    if problem.pattern is None:
        return None
    if problem.pattern == "documents":
        return patterns.document([small, rows - small], causal=problem.causal) if rows > small else None
    if problem.pattern == "causal window":  # right of its bottom left corner nothing is empty between two rows
        return patterns.causal(problem.seq) & patterns.sliding_window(problem.seq, small, small)
    return {
        "causal": lambda: patterns.causal(problem.seq),
        "window": lambda: patterns.sliding_window(problem.seq, small, small // 2),
        "prefix": lambda: patterns.prefix_lm(problem.seq, small),
        "local": lambda: patterns.block_local(problem.seq, 32, 1),
        "block causal": lambda: patterns.block_causal(problem.seq, 32),
        "full": lambda: patterns.full(problem.seq),
    }[problem.pattern]()


def lists_of(there: Tensor, room: int) -> fw.BlockLists:
    """In shuffled order, with garbage behind the counts."""
    counts = there.sum(-1, dtype=torch.int32)
    width = there.shape[-1]
    order = (there.int() + torch.rand(there.shape, device=there.device)).argsort(-1, descending=True)
    garbage = torch.randint(-(2**31), 2**31 - 1, (*there.shape[:3], width + room), device=there.device)
    behind = torch.arange(width + room, device=there.device) >= counts[..., None]
    indices = torch.nn.functional.pad(order, (0, room)).where(~behind, garbage).int()
    wide = torch.stack([indices, torch.full_like(indices, 3)], -1).flatten(-2)
    return fw.BlockLists(counts.mT.contiguous().mT, wide[..., ::2])


def blocks_of(problem: Problem, device: torch.device) -> tuple[Tensor | fw.BlockLists, Tensor]:
    """What is given as blocks, and the mask (B, Hq, Sq, Sk) that it means."""
    rows, cols = (torch.arange(n, device=device) // b for n, b in zip(problem.seq, problem.block, strict=True))
    lines = [-(-n // b) for n, b in zip(problem.seq, problem.block, strict=True)]
    there = torch.rand((*problem.lists, *lines), device=device) < problem.density
    mask = there.repeat_interleave(problem.heads[0] // there.shape[1], 1)[:, :, rows][..., cols]
    mask = mask.expand(problem.batch, -1, -1, -1)
    if problem.kind == "lists":
        return lists_of(there, problem.entries), mask
    return there.mT.contiguous().mT if problem.number % 2 else there, mask


def selection(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks of each query, none twice, some entries for none in any way."""
    (rows, cols), (heads, heads_k), block = problem.seq, problem.heads, problem.block[0]
    columns = -(-cols // block)
    order = torch.rand(problem.batch, heads_k, rows, max(columns, problem.entries), device=device)
    order = order.argsort(-1)[..., : problem.entries]
    none = (torch.rand(order.shape, device=device) < 0.2) | (order >= columns)
    sign = 2 * torch.randint(0, 2, order.shape, device=device) - 1
    indices = order.where(~none, torch.randint(columns, 2**31 - 1, order.shape, device=device) * sign)
    chosen = torch.zeros(*order.shape[:3], columns + 1, dtype=torch.bool, device=device)
    chosen.scatter_(-1, order.where(~none, columns), True)
    mask = chosen[..., torch.arange(cols, device=device) // block]
    if problem.causal:
        own = torch.arange(rows, device=device)[:, None] + cols - rows
        mask = mask & (torch.arange(cols, device=device) <= own)
    return indices.int(), mask.repeat_interleave(heads // heads_k, 1)


def starts(problem: Problem, random_: random.Random) -> tuple[list[int], list[int]]:
    """Documents of queries and keys, which may leave rows outside and may be empty."""
    count = problem.entries
    given = []
    for length in problem.seq:
        cuts = sorted(random_.randint(0, length) for _ in range(count + 1))
        if random_.random() < 0.5:
            cuts[0], cuts[-1] = 0, length
        given.append(cuts)
    return given[0], given[1]


def packed_mask(problem: Problem, cu_q: list[int], cu_k: list[int], device: torch.device) -> Tensor:
    mask = torch.zeros(problem.seq, dtype=torch.bool, device=device)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        own = torch.arange(b - a, device=device)[:, None] + (d - c) - (b - a)
        apart = torch.arange(d - c, device=device) - own
        seen = apart <= 0 if problem.causal else torch.ones_like(apart, dtype=torch.bool)
        left, right = problem.window
        seen = seen if left is None else seen & (apart >= -left)
        mask[a:b, c:d] = seen if right is None else seen & (apart <= right)
    return mask[None, None].expand(1, problem.heads[0], -1, -1)


@dataclass
class Case:
    """A call, its inputs, and the mask that it means; `rows` are those that have a sink."""

    inputs: dict[str, Tensor]
    call: Any
    mask: Tensor
    rows: Tensor


def block_case(problem: Problem, inputs: dict[str, Tensor], device: torch.device) -> Case:
    given, mask = blocks_of(problem, device)
    pattern = pattern_of(problem)
    mask = mask if pattern is None else mask & pattern.mask(device)
    padding = None
    if problem.padding:
        padding = torch.rand(problem.batch, problem.seq[1], device=device) < 0.3
        mask = mask & ~padding[:, None, None]
    bias = fw.alibi(inputs["slopes"]) if problem.slopes else None

    def call(given_inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = (given_inputs[name] for name in "qkv")
        return fw.attention(
            *(q, k, v, pattern, problem.scale, given_inputs.get("bias", bias), problem.softcap), return_lse=True,
            key_padding_mask=padding, precision=problem.precision, sinks=given_inputs.get("sinks"), blocks=given,
            block=problem.block,
        )  # fmt: skip

    return Case(inputs, call, mask, torch.ones(problem.seq[0], dtype=torch.bool, device=device))


def selected_case(problem: Problem, inputs: dict[str, Tensor], device: torch.device) -> Case:
    indices, mask = selection(problem, device)

    def call(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        options = dict(scale=problem.scale, sinks=given.get("sinks"), return_lse=True)
        q, k, v = (given[name] for name in "qkv")
        return fw.selected_attention(q, k, v, indices, problem.block[0], problem.causal, **options)  # type: ignore

    return Case(inputs, call, mask, torch.ones(problem.seq[0], dtype=torch.bool, device=device))


def varlen_case(problem: Problem, inputs: dict[str, Tensor], device: torch.device, random_: random.Random) -> Case:
    cu_q, cu_k = starts(problem, random_)
    same = problem.seq[0] == problem.seq[1] and random_.random() < 0.7
    cu_k = cu_q if same else cu_k
    wide = random_.choice((torch.int32, torch.int64))
    given = [torch.tensor([[x, -7] for x in cu], dtype=wide, device=device)[:, 0] for cu in (cu_q, cu_k)]
    bounds = [max(b - a for a, b in itertools.pairwise(cu)) if len(cu) > 1 else 0 for cu in (cu_q, cu_k)]
    most = bounds if problem.bounded else [None, None]

    def call(given_inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        packed = [given_inputs[name][0].transpose(0, 1) for name in "qkv"]
        o, lse = fw.varlen_attention(
            *packed, given[0], None if same else given[1], *most, problem.causal, problem.window, problem.scale,
            given_inputs.get("sinks"), True,
        )  # fmt: skip
        return o.transpose(0, 1)[None], lse[None]

    row = torch.arange(problem.seq[0], device=device)
    return Case(
        inputs, call, packed_mask(problem, cu_q, cu_k, device), (row >= cu_q[0]) & (row < cu_q[-1]) & (len(cu_q) > 1)
    )


def make(problem: Problem, device: torch.device, random_: random.Random) -> Case:
    (rows, cols), (heads, heads_k), (depth, width) = problem.seq, problem.heads, problem.dims
    shapes = {"q": (heads, rows, depth), "k": (heads_k, cols, depth), "v": (heads_k, cols, width)}
    inputs = {n: torch.randn((problem.batch, *s), device=device).to(problem.dtype) for n, s in shapes.items()}
    if problem.sinks:
        inputs["sinks"] = torch.randn(heads, device=device).to(
            problem.dtype if problem.sinks == "own" else torch.float32
        )
    if problem.bias is not None:
        full = (problem.batch, heads, rows, cols)
        sizes = [n if kept else 1 for n, kept in zip(full, problem.bias, strict=True)]
        inputs["bias"] = torch.randn(sizes, device=device).to(problem.dtype)
    if problem.slopes:
        inputs["slopes"] = torch.rand(heads, device=device) * 0.1
    make_case = {"selected": selected_case, "varlen": varlen_case}.get(problem.kind, block_case)
    more = (random_,) if problem.kind == "varlen" else ()
    case = make_case(problem, inputs, device, *more)  # type: ignore[operator]
    group = case.mask.unflatten(1, (heads_k, -1)).any(2)
    unseen = ~group.any(-2)[..., None]
    for name, how in zip("qkv", problem.strides, strict=False):
        x = inputs[name] if name == "q" else inputs[name].masked_fill(unseen, math.nan)
        inputs[name] = laid_out(x, how)
    return case


def most(t: Tensor) -> Tensor:
    return t.amax() if t.numel() else t.new_zeros(())


@dataclass
class Reference:
    """In float64: results, gradients, and for each the sum of what its terms are at most, which rounding acts on."""

    values: dict[str, Tensor]
    sizes: dict[str, Tensor]
    largest: Tensor  # what a score's products add up to at most


def reference(problem: Problem, case: Case, d_o: Tensor | None, d_lse: Tensor | None) -> Reference:
    heads, heads_k = problem.heads
    wide = {n: t.detach().double().nan_to_num(0) for n, t in case.inputs.items()}
    leaves = {n: t.requires_grad_(d_o is not None and n != "slopes") for n, t in wide.items()}
    q, k, v = (leaves[n] for n in "qkv")
    k_all, v_all = (t.repeat_interleave(heads // heads_k, 1) for t in (k, v))
    scale = problem.dims[0] ** -0.5 if problem.scale is None else problem.scale
    s = q @ k_all.mT * scale
    largest = most((q.detach().abs() @ k_all.detach().abs().mT) * abs(scale))
    s = problem.softcap * torch.tanh(s / problem.softcap) if problem.softcap else s
    if "bias" in leaves:
        s = s + leaves["bias"]
        largest = largest + most(leaves["bias"].detach().abs())
    if problem.slopes:
        own = torch.arange(problem.seq[0], device=s.device)[:, None] + problem.seq[1] - problem.seq[0]
        distance = (own - torch.arange(problem.seq[1], device=s.device)).abs()
        s = s - wide["slopes"][:, None, None] * distance
        largest = largest + most(wide["slopes"]) * most(distance)
    s = s.masked_fill(~case.mask, -math.inf)
    if "sinks" in leaves:
        sink = leaves["sinks"][:, None].expand(heads, problem.seq[0]).masked_fill(~case.rows, -math.inf)
        s = torch.cat([s, sink[None, ..., None].expand(*s.shape[:-1], 1)], -1)
    top = s.detach().amax(-1, keepdim=True).clamp(min=-1e30) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    weight = (s - top).exp()
    total = weight.sum(-1, keepdim=True)
    seen = (total > 0)[..., 0]
    share = weight / total.where(total > 0, 1)
    keys = share[..., : problem.seq[1]]
    o, lse = keys @ v_all, total.where(total > 0, 1)[..., 0].log() + top[..., 0]
    lse = lse.where(seen, -math.inf)
    p, values = keys.detach(), {"o": o.detach(), "lse": lse.detach()}
    sizes = {"o": p @ v_all.detach().abs(), "lse": torch.ones_like(lse.detach())}
    if d_o is not None and d_lse is not None:
        names = [n for n in leaves if n != "slopes"]
        found = torch.autograd.grad(
            (o, lse.masked_fill(~seen, 0)), [leaves[n] for n in names], (d_o, d_lse), allow_unused=True
        )
        values |= {f"d_{n}": torch.zeros_like(wide[n]) if g is None else g for n, g in zip(names, found, strict=True)}
        sizes |= gradient_sizes(problem, case, wide, share.detach(), sizes["o"], d_o, d_lse, abs(scale))
    return Reference(values, sizes, largest)


def gradient_sizes(
    problem: Problem, case: Case, wide: dict[str, Tensor], share: Tensor, o: Tensor, d_o: Tensor, d_lse: Tensor,
    scale: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Of each gradient, what the absolute values of all its terms add up to."""
    heads, heads_k = problem.heads
    q, k, v = (wide[n].detach().abs() for n in "qkv")
    k_all, v_all = (t.repeat_interleave(heads // heads_k, 1) for t in (k, v))
    d_o, d_lse, p = d_o.abs(), d_lse.abs(), share[..., : problem.seq[1]]
    delta = (d_o * o).sum(-1, keepdim=True) + d_lse[..., None]
    ds = p * (d_o @ v_all.mT + delta)
    of_group = lambda t: t.unflatten(1, (heads_k, -1)).sum(2)  # noqa: E731
    sizes = {
        "d_q": scale * ds @ k_all,
        "d_k": of_group(scale * ds.mT @ q),
        "d_v": of_group(p.mT @ d_o),
    }
    if "sinks" in wide:
        sizes["d_sinks"] = (share[..., -1:] * delta).sum((0, 2, 3))
    if "bias" in wide:
        sizes["d_bias"] = ds.sum_to_size(wide["bias"].shape)
    return sizes


def excess(problem: Problem, name: str, got: Tensor, want: Tensor, size: Tensor, largest: Tensor) -> Tensor:
    """By how much the worst element is beyond what rounding explains; above 1 is wrong, and so is NaN."""
    finite = want.isfinite()
    where = (got.double() == want) | finite  # −inf where there is −inf
    unit = ROUNDING[problem.dtype]
    scores = SCORE[problem.precision] * (1 + largest)
    if name == "lse":
        allowed = scores + 1e-6 * want.abs()
    else:
        products = 4 * unit if problem.dtype != torch.float32 else 16 * unit
        products += 4 * SCORE[problem.precision] if problem.precision == "tf32" else 0.0
        allowed = 1.05 * unit * want.abs() + (products + 4 * scores) * size + 1e-6
    ratio = ((got.double() - want).abs() / allowed).where(finite, 0)
    return ratio.where(where, math.inf).nan_to_num(math.inf).amax() if got.numel() else want.new_zeros(())


def run(problem: Problem, seed: int, device: torch.device) -> dict[str, Tensor]:
    """The excess of the result, and of the gradients where they are asked for."""
    torch.manual_seed(seed * 1_000_003 + problem.number)
    case = make(problem, device, random.Random(f"{seed} {problem.number} starts"))
    names = [n for n in case.inputs if n != "slopes"]
    case.inputs = {n: t.detach().requires_grad_(problem.backward and n in names) for n, t in case.inputs.items()}
    o, lse = case.call(case.inputs)
    assert o.dtype == problem.dtype and o.shape == (*case.inputs["q"].shape[:3], problem.dims[1]), problem
    got: dict[str, Tensor] = {"o": o.detach(), "lse": lse.detach()}
    d_o = d_lse = None
    if problem.backward:
        d_o = laid_out(torch.randn(o.shape, device=device).to(o.dtype), problem.strides[3])
        d_lse = torch.randn(lse.shape, device=device) * (problem.number % 3 == 0)
        d_lse = d_lse.masked_fill(lse.detach() == -math.inf, 0)
        got |= gradients(case, names, (o, lse), (d_o, d_lse))
    wide = (None, None) if d_o is None or d_lse is None else (d_o.double(), d_lse.double())
    right = reference(problem, case, *wide)
    worst = {n: excess(problem, n, got[n], right.values[n], right.sizes[n], right.largest) for n in right.values}
    if problem.twice:
        again = dict(zip(("o", "lse"), results := case.call(case.inputs), strict=True))
        if d_o is not None and d_lse is not None:
            again |= gradients(case, names, results, (d_o, d_lse))
        same = torch.stack([(got[n] == again[n]).all() for n in got])
        worst["same bits"] = same.all().logical_not() * 2.0
    return worst


def gradients(
    case: Case, names: list[str], results: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    found = torch.autograd.grad(results, [case.inputs[n] for n in names], upstream)
    return {f"d_{n}": g for n, g in zip(names, found, strict=True)}


if __name__ == "__main__":
    soak.main(__doc__, draw, run)
