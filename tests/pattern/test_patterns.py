"""Regular patterns from Python: what calls take and refuse, and algebra against masks."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fretwork as fw

P = fw.patterns
numbers = st.integers(0, 7)


@st.composite
def leaves(draw, rows=23, cols=29):
    seq, n, m = (rows, cols), draw(numbers), draw(numbers)
    offset = draw(st.sampled_from([None, 0, -4, 11]))
    positions = draw(st.lists(st.integers(0, cols - 1), max_size=4))
    return draw(st.sampled_from([
        P.causal(seq, offset=offset), P.sliding_window(seq, n, m, offset=offset), P.strided(seq, n + 1, offset=offset),
        P.dilated(seq, n, m + 1, draw(st.booleans()), offset=offset), P.fixed(seq, 8, n, offset=offset),
        P.longformer(seq, n, positions, offset=offset), P.block_local(seq, n + 1, m, offset=offset),
        P.vertical_slash(seq, positions, [0, n, m], offset=offset), P.band(seq, n - 9, m + 1, 4, offset=offset),
        P.bigbird(seq, n + 1, 1, 1, 1, m, offset=offset), P.prefix_lm(seq, n, offset=offset),
        P.longnet(seq, [6, 10], [n + 1, m + 1], 1, offset=offset), P.sinks(seq, n, m, offset=offset)]))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(leaves(), min_size=1, max_size=4), st.data())
def test_algebra_follows_masks(parts, data):
    pattern, mask = parts[0], parts[0].numpy_mask()
    for other in parts[1:]:
        if data.draw(st.booleans()):
            pattern, mask = pattern | other, mask | other.numpy_mask()
        else:
            pattern, mask = pattern & other, mask & other.numpy_mask()
    assert np.array_equal(pattern.numpy_mask(), mask) and pattern.nnz == mask.sum()
    assert np.array_equal(pattern.T.numpy_mask(), mask.T) and pattern == pattern.T.T
    assert fw.Pattern.parse(pattern.text) == pattern and type(pattern) is fw.Pattern
    row, col = data.draw(st.integers(0, 22)), data.draw(st.integers(0, 28))
    assert pattern.contains(row, col) == mask[row, col]
    assert np.array_equal(P.from_mask(mask).numpy_mask(), mask)


LENGTHS = tuple(100 + n * 7919 % 2900 for n in range(4000))


@pytest.mark.parametrize("first, second", [
    ("swin(1024,1024,8,shift=(4,4))", "sliding_tile((1024,1024),8,3)"),
    ("swin(1024,1024,8,shift=(4,4))", "swin(1024,1024,8)"),
    (f"document({LENGTHS},causal=True)", f"strided({sum(LENGTHS)},64)"),
])  # fmt: skip
def test_unions_of_many_parts_are_cheap(first, second):
    """16,384 shifted windows, cut by another grid, are few kinds of pieces, and documents meet what is near them: each
    with each they took minutes."""
    a, b = fw.Pattern.parse(first), fw.Pattern.parse(second)
    assert (a | b).nnz == a.nnz + b.nnz - (a & b).nnz


@pytest.mark.parametrize("stride", [9, 10**6])
@pytest.mark.parametrize("seq", [(9, 5), (5, 9)])
def test_strides_that_no_two_positions_share(seq, stride):
    """They are plain order also where a multiple lies among the positions: who plans would look at every class."""
    for offset in (-2, stride - 3):
        p, j = np.ogrid[offset : offset + seq[0], : seq[1]]
        for pattern, mask in (
            (P.dilated(seq, 2, stride, offset=offset), ((p - j) % stride == 0) & (abs(p - j) <= 2 * stride)),
            (P.strided(seq, stride, offset=offset), (j <= p) & ((p - j < stride) | ((p - j) % stride == 0))),
            (P.fixed(seq, stride, 7, offset=offset), (j <= p) & ((p // stride == j // stride) | (j >= stride - 7))),
            (P.block_local(seq, stride, 1, offset=offset), (p // stride - j // stride) // 2 == 0),
            (P.band(seq, -3, stride, 2, offset=offset), (j - p == -3) | (j - p == stride - 3)),
            (P.longnet(seq, [64], [stride], 1, offset=offset), (p // 64 == 0) & (p % stride == 1) & (j == 1)),
        ):
            assert np.array_equal(pattern.numpy_mask(), mask) and pattern.nnz == mask.sum(), pattern
            assert pattern.nnz == 0 or "plain order: " in pattern.describe(), pattern
            assert "modulo" not in pattern.describe() and "of strides" not in pattern.describe(), pattern


@pytest.mark.parametrize("block", [8, (16, 24)])
@pytest.mark.parametrize(
    "text", ["strided(100,9)", "dilated((50,130),3,7)", "band(40,1,3,0)", "kronecker(2,8,24,3)", "axial(8,9)"]
)
def test_block_cover(text, block):
    pattern = fw.Pattern.parse(text)
    layout, fill_in = pattern.block_cover(block)
    mask = pattern.numpy_mask().reshape(pattern.shape[-2:])
    (r, c), (lines, across) = layout.block_shape, layout.blocks
    padded = np.zeros((lines * r, across * c), bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    blocks = padded.reshape(lines, r, across, c).any((1, 3))
    assert (lines, across) == (-(-mask.shape[0] // r), -(-mask.shape[1] // c))
    assert np.array_equal(layout.numpy_mask()[0, ::r, ::c], blocks) and layout.heads == 1
    assert fill_in == pytest.approx(1 - mask.sum() / max(1, blocks.sum() * r * c) if blocks.any() else 0)


def test_values():
    assert P.causal(9) | P.full(9) == P.full(9) | P.causal(9) != P.causal(9)
    assert P.causal(9) | P.causal(9) == P.causal(9) & P.causal((9, 9)) == P.causal(9)
    with pytest.raises(TypeError):
        P.causal(9) | 3
    with pytest.raises(ValueError, match=r"union: patterns: expected equal shapes, got \(9, 9\) and \(8, 8\)"):
        P.causal(9) | P.causal(8)


def test_saved_by_torch(tmp_path):
    patterns = [P.causal(9) | P.strided(9, 2), fw.BlockLayout([[1, 0]], block=8), fw.KroneckerPattern(2, 3, 4, 5)]
    torch.save(patterns, tmp_path / "p.pt")
    assert torch.load(tmp_path / "p.pt") == patterns


def test_describe():
    """What was recognised, and what attention costs: tiles by order."""
    assert P.causal(256).describe().splitlines() == [
        "causal(256): 256×256, 32896 elements, 50.2 %",
        "  plain order: 1 triangle; 100 % of the elements",
        "  3 tiles of 128×128 in plain order",
        f"  on a GPU attention multiplies {3 * 128 * 128 / 32896:.3g} times the elements",
    ]
    assert "  32 tiles of 128×128 of tokens 4 apart\n" in P.dilated(2048, 64, 4).describe()
    assert "  4 tiles of 128×128 in plain order\n" in P.causal((1, 512)).describe()
    assert "tiles of 128×128 of patches of 8×16\n" in P.neighborhood((64, 64), 7).describe()
    for without in (P.sliding_window(2**30, 4, 0), P.document([])):
        assert "attention" not in without.describe()


def test_layouts_and_kronecker_patterns_join():
    layout = fw.BlockLayout([[1, 0], [0, 1]], block=8)
    assert (P.causal(16) & layout).nnz == 2 * 36 and (layout | P.causal(16)).nnz == 136 + 2 * 28
    factor = fw.KroneckerPattern(2, 2, 2, 4)
    assert np.array_equal((factor & P.full(16)).numpy_mask(), factor.numpy_mask())
    assert np.array_equal((layout | factor).numpy_mask(), layout.numpy_mask()[0] | factor.numpy_mask())
    two = fw.BlockLayout(np.ones((2, 2, 2), dtype=bool), block=8)
    for name, call in {
        "union": lambda: P.causal(16) | two, "intersection": lambda: two & two, "contains": lambda: two.contains(0, 0),
        "acsr": two.acsr, "describe": two.describe, "block_cover": two.block_cover,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: pattern: expected a layout of one head, got 2"):
            call()
    assert layout.contains(0, 7) and not layout.contains(0, 8) and len(factor.acsr()[0]) == 16


@pytest.mark.parametrize("convert", [
    list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.uint16), lambda v: torch.tensor(v).int(),
    lambda v: iter(v), lambda v: np.array(v)[::-1][::-1]])  # fmt: skip
def test_lists_of_many_kinds(convert):
    assert P.longformer(20, 1, convert([3, 9])) == P.longformer(20, 1, [9, 3, 3])
    assert P.document(convert([3, 9])) == fw.Pattern.parse("document((3,9))")
    assert P.acsr(convert([0, 1]), convert([1, 1]), convert([2, 3]), 4) == P.acsr([0, 1], [1, 1], [2, 3], cols=4)


def test_ranges_in_texts():
    assert fw.Pattern.parse("longformer(64,5,range(3))") == P.longformer(64, 5, range(3))
    assert fw.Pattern.parse("vertical_slash(64, range(8, 40, 7), range(2, 5))") == P.vertical_slash(
        64, range(8, 40, 7), range(2, 5)
    )
    assert fw.Pattern.parse("longformer(64,5,range(3,3))") == P.longformer(64, 5, [])
    far = "longformer(64,5,range(-9223372036854775807,9223372036854775807))"
    for text, words in {
        "longformer(64,5,range())": "range: stop: expected an integer, got nothing",
        "longformer(64,5,range(1,2,0))": "range: arguments: expected stop, or start and stop, and a step of at least 1",
        "longformer(64,5,range(1,2,3,4))": "range: arguments: expected stop, or start and stop, and a step",
        "longformer(64,5,range(stop=3))": "range: arguments: expected stop, or start and stop, and a step",
        "longformer(64,5,range(16777217))": r"range: arguments: expected at most 2\^24 integers, got 16777217",
        far: r"range: arguments: expected at most 2\^24 integers, got 18446744073709551614",
        "longformer(64,5,full(3))": "longformer: globals: expected an integer or a tuple of them, got a pattern",
        "range(3)": "Pattern.parse: text: expected one of ",
    }.items():
        with pytest.raises(ValueError, match=f"^{words}"):
            fw.Pattern.parse(text)


@pytest.mark.parametrize("call, text", [
    (lambda: P.strided(16.0, 2), "strided: seq: expected an int, got 16.0"),
    (lambda: P.strided(16, "2"), "strided: stride: expected an int, got '2'"),
    (lambda: P.strided(16, None), "strided: stride: expected an int, got None"),
    (lambda: P.sliding_window(16, True, 0), "sliding_window: left: expected an int, got True"),
    (lambda: P.causal((16,)), r"causal: seq: expected S or \(Sq, Sk\), got 1"),
    (lambda: P.neighborhood((8, 8), (3,)), "neighborhood: window: expected one number, or 2 as there are axes, got 1"),
    (lambda: P.neighborhood((8, 8), 3, causal=[True]), "neighborhood: causal: expected one number, or 2"),
    (lambda: P.swin(8, 8, 4, (1,)), "swin: shift: expected one number, or 2 as there are axes, got 1"),
    (lambda: P.swin(2**20, 2**20, 4), "swin: shape: expected fewer than"),
    (lambda: P.document([2**40]), "document: lengths: expected fewer than"),
    (lambda: P.acsr([0], [1], [1], -1), "acsr: cols: expected sizes from 0"),
    (lambda: P.from_layout(fw.KroneckerPattern(2, 2, 2, 2), head=1), "from_layout: head: expected 0,"),
    (lambda: P.causal(8).block_cover(7), "block_cover: block: expected 8 to 128, got 7"),
    (lambda: P.sliding_window(2**20, 5, 0).block_cover(8), r"block_cover: block: expected at most 2\^30 blocks"),
    (lambda: P.dilated(16, 2, 2, causal=1), "dilated: causal: expected True or False, got 1"),
    (lambda: P.longformer(16, 1, 3), "longformer: globals: expected a sequence of ints, got 3"),
    (lambda: P.longformer(16, 1, [1.5]), "longformer: globals: expected an int, got 1.5"),
    (lambda: P.longformer(16, 1, np.ones((2, 2), dtype=int)), "longformer: globals: expected one axis"),
    (lambda: P.document(np.ones(3)), "document: lengths: expected integers, got float64"),
    (lambda: P.from_mask(np.ones(3, dtype=bool)), r"from_mask: mask: expected \(Sq, Sk\), got shape \(3,\)"),
    (lambda: P.from_mask([[0, 2]]), "from_mask: mask: expected 0 or 1 everywhere, got 2"),
    (lambda: P.from_layout(P.causal(8)), "from_layout: layout: expected a BlockLayout, got Pattern"),
    (lambda: P.causal(8).contains(0.5, 1), "contains: row: expected an int, got 0.5"),
    (lambda: P.causal(2**63), "causal: seq: expected a number of 64 bits"),
    (lambda: P.causal(2**62), "causal: seq: expected sizes from 0 to 2"),
    (lambda: P.longformer(9, 1, [3]).acsr(), "acsr: pattern: expected rows that are one progression each, got row 0,"),
])  # fmt: skip
def test_refused(call, text):
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        call()


@pytest.mark.parametrize("text", ["neighborhood((0,8),3)", "neighborhood((0,),2,causal=(True,))",
                                  "sliding_tile((4,0),2,1)", "swin(0,8,4)", "axial(0,3)"])  # fmt: skip
def test_grids_of_nothing(text):
    assert fw.Pattern.parse(text).shape == (0, 0) and fw.Pattern.parse(text).text == text


def test_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "import fretwork as fw; p = fw.patterns.strided(64, 8) | fw.patterns.from_mask([[1] * 64] * 64)\n"
        "assert p.nnz == 4096 and p.numpy_acsr()[2].sum() == 4096"
    )
    assert importlib.util.find_spec("torch") is not None
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repr_is_short():
    """A long text is cut; what is short is there to be typed again."""
    for text in ("causal(64)", "document((1,2,3))", "from_mask((2,2),~N)", "vertical_slash(64,(0,8,16),(0,1))"):
        assert repr(fw.Pattern.parse(text)) == f"Pattern('{text}')"
    mask = torch.zeros(600, 700, dtype=torch.bool)
    mask[:6, :7] = True
    assert (
        repr(fw.patterns.from_mask(mask))
        == "Pattern('from_mask((600,700),~…)', shape=(600, 700), nnz=42, density=0.0001)"
    )
    both = fw.patterns.document([2] * 100) | fw.patterns.from_mask(torch.eye(200))
    assert repr(both) == (
        "Pattern('document((2,2,2,2,…))|from_mask((200,200),~…)', shape=(200, 200), nnz=400, density=0.01)"
    )
    assert repr(fw.patterns.tree(range(-1, 63))).startswith("Pattern('tree((-1,0,1,2,…))', shape=(64, 64)")
