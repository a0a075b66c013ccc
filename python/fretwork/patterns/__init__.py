"""Patterns: windows, strides, dilations, grids, documents, and explicit ones.

Query i stands at position p = i + offset, where offset = Sk − Sq unless given: queries are the last Sq positions. `seq`
is S or (Sq, Sk). Patterns combine with `|` and `&`; `.T` exchanges queries and keys; p[8:, :100] is a piece of one.
Only `from_block_mask` needs torch.

>>> import fretwork as fw
>>> p = fw.patterns.sliding_window(4096, 255, 0) | fw.patterns.dilated(4096, 8, 256)
>>> p.shape, p.nnz
((4096, 4096), 1063040)
"""

from fretwork.patterns.block import BlockLayout as BlockLayout
from fretwork.patterns.kronecker import KroneckerPattern as KroneckerPattern
from fretwork.patterns.pattern import Pattern as Pattern
from fretwork.patterns.regular import (
    acsr,
    axial,
    band,
    bigbird,
    block_causal,
    block_local,
    causal,
    diag,
    dilated,
    document,
    fixed,
    from_block_mask,
    from_layout,
    from_mask,
    full,
    longformer,
    longnet,
    neighborhood,
    place,
    prefix_lm,
    sinks,
    sliding_tile,
    sliding_window,
    strided,
    swin,
    tree,
    vertical_slash,
    with_prefix,
)

__all__ = [
    "acsr", "axial", "band", "bigbird", "block_causal", "block_local", "causal", "diag", "dilated", "document", "fixed",
    "from_block_mask", "from_layout", "from_mask", "full", "longformer", "longnet", "neighborhood", "place",
    "prefix_lm", "sinks", "sliding_tile", "sliding_window", "strided", "swin", "tree", "vertical_slash", "with_prefix",
]  # fmt: skip
