"""The patterns that attention is measured on, each beside the rule on positions that other libraries are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import fretwork as fw

Rule = Callable[[Any, Any], Any]  # of query and key positions, ints or tensors
Case = tuple[Callable[[], fw.Pattern], Rule]


@dataclass(frozen=True)
class Sizes:
    """What the patterns are made of; `w` is the half of a window, and the rest follows it."""

    w: int = 512
    stride: int = 128
    window: int = 13  # of neighbourhoods
    tile: int = 8


GPU, CPU = Sizes(), Sizes(w=128, stride=64)


def clamped(window: int, size: int, dilation: int = 1) -> Rule:
    """A window of `window` positions of i's class modulo `dilation`, around i and inside [0, size)."""

    def rule(i: Any, j: Any) -> Any:
        of_class = (size - i % dilation + dilation - 1) // dilation
        begin = torch.clamp(i // dilation - window // 2, min=0)
        begin = torch.minimum(begin, of_class - window)
        at = j // dilation
        return (i % dilation == j % dilation) & (at >= begin) & (at < begin + window)

    return rule


def ending(window: int) -> Rule:
    """The `window` positions that end at i."""
    return lambda i, j: (j <= i) & (i - j < window)


def on_grid(sizes: tuple[int, ...], rules: list[Rule]) -> Rule:
    """Positions of a grid that meet on every axis."""

    def rule(i: Any, j: Any) -> Any:
        hit = None
        for size, axis in zip(reversed(sizes), reversed(rules), strict=True):
            one = axis(i % size, j % size)
            hit = one if hit is None else hit & one
            i, j = i // size, j // size
        return hit

    return rule


def grid(s: int, axes: int = 2) -> tuple[int, ...]:
    """A grid of s positions, as even as powers of two allow."""
    sizes, rest = [], s
    for left in range(axes, 1, -1):
        sizes.append(1 << (rest.bit_length() - 1) // left)
        rest //= sizes[-1]
    return (*sizes, rest)


def tile_of(rule: Rule, tile: int) -> Rule:
    return lambda i, j: rule(i // tile, j // tile)


def region(size: int, window: int, shift: int) -> Rule:
    """Windows after the shift, which the wrap cuts."""

    def part(x: Any) -> Any:
        return (x - shift) % size // window * 2 + (x < shift) * 1

    return lambda i, j: part(i) == part(j)


def documents(s: int) -> list[int]:
    lengths = [s // 3, s // 7, s // 5, s // 9]
    return [*lengths, s - sum(lengths)]


def same_document(s: int, device: torch.device) -> Rule:
    lengths = torch.tensor(documents(s), device=device)
    of = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    return lambda i, j: (of[i] == of[j]) & (j <= i)


def drawn_blocks(s: int, block: int, device: torch.device) -> Case:
    """BigBird draws blocks: others read them from a table, as its users would make one."""
    table = fw.patterns.bigbird(s // block, 1, 1, 2, 3, seed=5).mask(device)
    return (
        lambda: fw.patterns.bigbird(s, block, 1, 2, 3, seed=5),
        lambda i, j: table[i // block, j // block],
    )


def of_segments(pairs: tuple[tuple[int, int], ...]) -> Rule:
    def rule(i: Any, j: Any) -> Any:
        hit = None
        for w, r in pairs:
            one = (i // w == j // w) & (i % r == 0) & (j % r == 0)
            hit = one if hit is None else hit | one
        return hit

    return rule


def flat_cases(s: int, device: torch.device, sizes: Sizes) -> dict[str, Case]:
    """Patterns of a sequence."""
    p, w, stride = fw.patterns, sizes.w, sizes.stride
    few = max(w // 8, 1)
    every = max(s // 64, 1)
    narrow = max(w // 4, 1)
    near, far = max(w // 2, 1), (2 * w, 4 * w, 8 * w - 1)
    pairs = ((4 * w, 1), (8 * w, 2), (16 * w, 4))
    return {
        "full": (lambda: p.full(s), lambda i, j: j >= 0),
        "causal": (lambda: p.causal(s), lambda i, j: j <= i),
        "window": (lambda: p.sliding_window(s, w, w), lambda i, j: (i - j <= w) & (j - i <= w)),
        "causal window": (lambda: p.sliding_window(s, 2 * w - 1, 0), lambda i, j: (j <= i) & (i - j < 2 * w)),
        "block-local": (lambda: p.block_local(s, 2 * w), lambda i, j: i // (2 * w) == j // (2 * w)),
        "longformer": (
            lambda: p.longformer(s, w, range(few)),
            lambda i, j: ((i - j <= w) & (j - i <= w)) | (i < few) | (j < few),
        ),
        "dilated": (
            lambda: p.dilated(s, w, 4),
            lambda i, j: (i - j <= 4 * w) & (j - i <= 4 * w) & ((i - j) % 4 == 0),
        ),
        "dilated narrow": (
            lambda: p.dilated(s, narrow, 4),
            lambda i, j: (i - j <= 4 * narrow) & (j - i <= 4 * narrow) & ((i - j) % 4 == 0),
        ),
        "dilated causal": (
            lambda: p.dilated(s, w, 4, causal=True),
            lambda i, j: (j <= i) & (i - j <= 4 * w) & ((i - j) % 4 == 0),
        ),
        "strided": (
            lambda: p.strided(s, stride),
            lambda i, j: (j <= i) & ((i - j < stride) | ((i - j) % stride == 0)),
        ),
        "fixed": (
            lambda: p.fixed(s, stride, max(stride // 8, 1)),
            lambda i, j: (j <= i) & ((i // stride == j // stride) | (j % stride >= stride - max(stride // 8, 1))),
        ),
        "bigbird": drawn_blocks(s, max(stride // 2, 1), device),
        "longnet": (lambda: p.longnet(s, [a for a, _ in pairs], [b for _, b in pairs]), of_segments(pairs)),
        "document": (lambda: p.document(documents(s), causal=True), same_document(s, device)),
        "prefix": (lambda: p.prefix_lm(s, s // 8), lambda i, j: (j <= i) | (j < s // 8)),
        "sinks": (lambda: p.sinks(s, few, 2 * w), lambda i, j: (j <= i) & ((j < few) | (i - j < 2 * w))),
        "vertical-slash": (
            lambda: p.vertical_slash(s, range(0, s, every), [*range(near), *far]),
            lambda i, j: (
                (j <= i)
                & ((j % every == 0) | (i - j < near) | (i - j == far[0]) | (i - j == far[1]) | (i - j == far[2]))
            ),
        ),
        "band": (
            lambda: p.band(s, -2 * w, 2, w),
            lambda i, j: (j - i >= -2 * w) & (j - i < 0) & ((j - i) % 2 == 0),
        ),
    }


@cache
def regions(s: int, w: int) -> torch.Tensor:
    """Someone's mask: a window and rectangles wherever they fell."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(s, s, dtype=torch.bool).triu_(-(w // 4)).tril_(w // 4)
    for i, j, rows, cols in torch.randint(0, s, (max(s // 32, 1), 4), generator=draw).tolist():
        mask[i : i + 1 + rows % (w // 2), j : j + 1 + cols % (w // 2)] = True
    return mask


def explicit_cases(s: int, device: torch.device, sizes: Sizes) -> dict[str, Case]:
    """Patterns that people bring: blocks of a layout, a mask, and progressions whose stride changes with the rows."""
    p, w, block = fw.patterns, sizes.w, max(sizes.stride, 1)
    blocks = torch.rand(s // block, s // block, generator=torch.Generator().manual_seed(0)) < 0.1
    table = blocks.to(device)

    mask: list[torch.Tensor] = []  # made with the pattern: Flex's compiler would go through what makes it

    def explicit() -> fw.Pattern:
        mask[:] = [regions(s, w).to(device)]
        return p.from_mask(regions(s, w))

    def progressions() -> fw.Pattern:
        row = torch.arange(s)
        stride = 1 + row // w % 4
        count = torch.clamp(row // stride + 1, max=w)
        return p.acsr(row - stride * (count - 1), stride, count, s)

    def progression(i: Any, j: Any) -> Any:
        stride = 1 + i // w % 4
        return (j <= i) & (i - j < stride * w) & ((i - j) % stride == 0)

    return {
        "layout": (
            lambda: p.from_layout(fw.BlockLayout(blocks, block)),
            lambda i, j: table[i // block, j // block],
        ),
        "acsr": (progressions, progression),
        # Larger ones are refused.
        **({"mask": (explicit, lambda i, j: mask[0][i, j])} if s <= 2**15 else {}),
    }


def grid_cases(s: int, sizes: Sizes) -> dict[str, Case]:
    """Patterns of grids; those that a grid is too small for are left out."""
    p, n, t = fw.patterns, sizes.window, sizes.tile
    two, three = grid(s), grid(s, 3)
    small = max(n // 2, 1)  # of three axes, and of classes
    cases: dict[str, Case] = {
        "axial": (
            lambda: p.axial(two[0], two[1]),
            lambda i, j: (i // two[1] == j // two[1]) | (i % two[1] == j % two[1]),
        ),
        "swin": (lambda: p.swin(two[0], two[1], 2 * t, t), on_grid(two, [region(size, 2 * t, t) for size in two])),
    }
    if min(two) >= n:
        cases["neighborhood"] = (lambda: p.neighborhood(two, n), on_grid(two, [clamped(n, size) for size in two]))
        cases["neighborhood causal"] = (
            lambda: p.neighborhood(two, n, causal=(True, False)),
            on_grid(two, [ending(n), clamped(n, two[1])]),
        )
    if min(two) >= 3 * t:
        cases["neighborhood strided"] = (
            lambda: p.neighborhood(two, 3 * t, stride=t),
            on_grid(two, [tile_of(clamped(3, size // t), t) for size in two]),
        )
    if min(two) // 2 >= small:
        cases["neighborhood dilated"] = (
            lambda: p.neighborhood(two, small, dilation=2),
            on_grid(two, [clamped(small, size, 2) for size in two]),
        )
    if min(three) >= small:
        cases["neighborhood 3-D"] = (
            lambda: p.neighborhood(three, small),
            on_grid(three, [clamped(small, size) for size in three]),
        )
    if min(two) >= 3 * t:
        cases["sliding tile"] = (
            lambda: p.sliding_tile(two, t, 3),
            on_grid(two, [tile_of(clamped(3, size // t), t) for size in two]),
        )
    return cases


def with_drafts(s: int, drafts: int, chains: int) -> list[int]:
    """The parents of a prompt and, behind it, of drafts in `chains` chains that take turns."""
    prompt = s - drafts
    return [n - 1 if n < prompt else max(prompt - 1, n - chains) for n in range(s)]


def piece_cases(s: int, sizes: Sizes) -> dict[str, Case]:
    """Patterns of blocks and trees, and patterns made of others."""
    p, w, stride = fw.patterns, sizes.w, sizes.stride
    few, half, drafts, row, col = max(w // 8, 1), s // 2, s // 8, s // 4, s // 8

    def drafted(i: Any, j: Any) -> Any:
        return (j <= i) & ((j < s - drafts) | ((i - j) % 4 == 0))

    def halves(i: Any, j: Any) -> Any:
        far = (i >= half) & ((i - j < stride) | ((i - j) % stride == 0))
        return (j <= i) & (((i < half) & (j < half)) | (far & (j >= half)))

    return {
        "block-causal": (lambda: p.block_causal(s, 2 * w), lambda i, j: j // (2 * w) <= i // (2 * w)),
        "tree": (lambda: p.tree(with_drafts(s, drafts, 4)), drafted),
        "place": (
            lambda: p.place(p.causal(half), (s, s), at=(row, col)),
            lambda i, j: (j >= col) & (j - col <= i - row) & (i - row < half),
        ),
        "diag": (lambda: p.diag([p.causal(half), p.strided(s - half, stride)]), halves),
        "prefix tokens": (
            lambda: p.with_prefix(p.sliding_window(s - few, w, w), few),
            lambda i, j: (i < few) | (j < few) | ((i - j <= w) & (j - i <= w)),
        ),
    }


def cases(s: int, device: torch.device, sizes: Sizes) -> dict[str, Case]:
    """Patterns by name: how Fretwork makes them, and the rule that others are given."""
    flat, pieces = flat_cases(s, device, sizes), piece_cases(s, sizes)
    return {**flat, **grid_cases(s, sizes), **pieces, **explicit_cases(s, device, sizes)}
