"""Patterns as Python values: what constructors take and refuse, equality, text, pickling, masks."""

import copy
import ctypes
import pickle
import threading
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fretwork as fw
from fretwork import _library
from fretwork.patterns.block import block_layout
from fretwork.patterns.pattern import opened

sides = st.sampled_from([8, 9, 16, 32, 100, 128])


@st.composite
def masks(draw):
    shape = draw(st.tuples(*(st.integers(0, 5),) * 3))
    bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(bits, dtype=bool).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(masks(), sides, sides)
def test_text_mask_and_transpose_agree(mask, r, c):
    layout = fw.BlockLayout(mask, (r, c))
    assert layout.shape == (mask.shape[0], mask.shape[1] * r, mask.shape[2] * c)
    assert layout.nnz == mask.sum() and layout.heads == mask.shape[0] and layout.blocks == mask.shape[1:]
    assert layout.block_shape == (r, c) and layout.block == (r if r == c else (r, c))
    assert np.array_equal(layout.numpy_mask(), mask.repeat(r, 1).repeat(c, 2))
    assert fw.Pattern.parse(layout.text) == layout == pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout)
    assert fw.BlockLayout(mask.swapaxes(1, 2), (c, r)) == layout.T and layout == layout.T.T
    assert hash(layout) == hash(fw.Pattern.parse(layout.text))


@pytest.mark.parametrize("convert", [
    lambda m: m, lambda m: m.long(), lambda m: m.to(torch.uint8), lambda m: m.numpy(), lambda m: m.tolist(),
    lambda m: m.bfloat16(), lambda m: m.int().tolist(), lambda m: m.mT.contiguous().mT,
    lambda m: m.numpy().astype(np.uint16)])  # fmt: skip
def test_masks_of_many_kinds(convert):
    mask = torch.rand(2, 3, 4) < 0.5
    assert fw.BlockLayout(convert(mask), 16) == fw.BlockLayout(mask, 16)
    assert fw.BlockLayout(convert(mask)[0], 16) == fw.BlockLayout(mask[:1], 16)


def test_a_mask_is_copied():
    mask = np.ones((1, 2, 2), dtype=np.uint8)
    layout = fw.BlockLayout(mask, 8)
    mask[:] = 0
    assert layout.nnz == 4 and layout.numpy_mask().all()


@pytest.mark.parametrize("mask, block, text", [
    (torch.full((2, 2), 0.5), 16, "mask: expected 0 or 1 everywhere, got 0.5"),
    (np.full((2, 2), np.nan), 16, "mask: expected 0 or 1 everywhere, got nan"),
    (np.ones((2, 2), dtype=complex), 16, "mask: expected a bool or integer dtype, got complex128"),
    (torch.tensor([[1e-50]], dtype=torch.float64), 16, "mask: expected 0 or 1 everywhere, got 1e-50"),
    (torch.eye(2).to_sparse(), 16, "mask: expected a dense tensor .*, got one with the layout torch.sparse_coo"),
    (torch.eye(2, device="meta"), 16, "mask: expected a dense tensor with data, got one with no data"),
    (None, 16, "mask: expected a bool or integer dtype, got NoneType"),
    ([[1, 0], [1]], 16, "mask: expected .*, got ragged lists"),
    ([1, 0], 16, r"mask: expected \(heads, rows, cols\) or \(rows, cols\), got \(2,\)"),
    ([[0, 2]], 16, "mask: expected 0 or 1 everywhere, got 2"),
    ([[0, -1]], 16, "mask: expected 0 or 1 everywhere, got -1"),
    ([[256]], 16, "mask: expected 0 or 1 everywhere, got 256"),
    ([[1]], 7, "block: expected 8 to 128, got 7"),
    ([[1]], True, r"block: expected an int or \(rows, cols\), got True"),
    ([[1]], (8, 8, 8), r"block: expected an int or \(rows, cols\), got 3 numbers")])  # fmt: skip
def test_refused(mask, block, text):
    with pytest.raises((ValueError, TypeError), match=f"^BlockLayout: {text}"):
        fw.BlockLayout(mask, block)


@pytest.mark.parametrize(
    "text",
    ["", "block", "block(", "block((1,1,1),(8,8),~)", "nothing(3)", "block@00", "\0", "✗", "\ud800", "full(8)\n"],
)
def test_texts_that_are_no_pattern(text):
    with pytest.raises(ValueError, match=r"\A.*: expected .*, got [^\n]+\Z") as refused:
        fw.Pattern.parse(text)
    assert type(refused.value) is ValueError and not str(refused.value).endswith("got '")
    with pytest.raises(TypeError, match=r"Pattern.parse: text: expected a str, got bytes"):
        fw.Pattern.parse(b"full(8)")


def test_values_are_read_only():
    layout = fw.BlockLayout([[1]], 8)
    for name in ("nnz", "text", "_text", "other"):
        with pytest.raises(AttributeError):
            setattr(layout, name, 0)
    with pytest.raises(AttributeError):
        del layout._text
    with pytest.raises(TypeError):
        fw.Pattern()
    assert layout != "block" and layout != fw.BlockLayout([[1]], 16) and layout in {layout}


def test_large_layouts_cross_by_digest():
    layout = fw.BlockLayout(torch.rand(2, 64, 64) < 0.3, 16)
    assert "@" in layout.key and len(layout.key) < 64 < len(layout.text)
    assert block_layout(layout.key) == layout
    assert pickle.loads(pickle.dumps(layout)).key == layout.key


def test_a_layout_is_known_for_as_long_as_it_lives():
    """However many others have been made since: the core keeps 256 MiB of texts, and the latest 256 patterns."""

    def with_block(n):
        mask = np.zeros((9000, 9000), np.uint8)
        mask[n, n] = 1
        return fw.BlockLayout(mask, 8)

    layout, values = with_block(0), torch.ones(1, 8, 8, requires_grad=True)
    out = fw.dsd(values, torch.ones(9000 * 8, 1), layout)
    keys = [with_block(n).key for n in range(1, 24)]
    for n in range(1, 300):
        fw.KroneckerPattern(n, 1, 1, 1)
    assert fw.dsd(values, torch.ones(9000 * 8, 1), layout).equal(out) and layout == layout.T
    out.sum().backward()
    block_layout(keys[-1])
    with pytest.raises(
        ValueError, match=r"or the digest of one made in this process, got 'block@.*', which is unknown"
    ):
        block_layout(keys[0])


def test_a_mask_too_large_to_make():
    layout = fw.Pattern.parse("random_blocks((1, 300, 300), 128, 0.01, 1)")
    with pytest.raises(ValueError, match=r"mask: pattern: expected at most 2\^30 elements, got 1474560000"):
        layout.mask()


def test_threads_make_and_read_patterns():
    failures = []

    def work(n):
        try:
            for k in range(50):
                mask = np.random.default_rng(n * 100 + k).random((1, 8, 8)) < 0.5
                layout = fw.BlockLayout(mask, 8)
                assert np.array_equal(layout.T.T.numpy_mask(), mask.repeat(8, 1).repeat(8, 2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_pickles_of_version_0_1(tmp_path):
    """Which name `fretwork.pattern._parsed`."""
    layout = fw.BlockLayout([[1, 0], [1, 1]], 16)
    old = f"cfretwork.pattern\n_parsed\n(V{layout.text}\ntR."
    assert pickle.loads(old.encode()) == layout
    torch.save({"layout": layout}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "old.pt", "w") as file:
        for name in new.namelist():
            data = new.read(name).replace(b"cfretwork.patterns.pattern\nparsed\n", b"cfretwork.pattern\n_parsed\n")
            assert name != "new/data.pkl" or data != new.read(name)
            file.writestr(name, data)
    assert torch.load(tmp_path / "old.pt", weights_only=True) == {"layout": layout}


def test_c_interface_refuses_what_python_never_sends():
    core = _library.core()
    sizes = (ctypes.c_int64 * 5)(2**40, 2**40, 1, 8, 8)
    assert not core.fretwork_block_layout(sizes, None) and "BlockLayout: mask: expected" in _library.last_error()
    with opened(fw.BlockLayout([[1]], 8)) as handle:
        assert core.fretwork_pattern_mask(handle, None, 3) == -1 and "expected 64, got 3" in _library.last_error()


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FRETWORK_LIB_DIR", str(tmp_path))
    with pytest.raises(ImportError, match=r"expected libfretwork\.so in .*make build"):
        _library.library_path("fretwork")
