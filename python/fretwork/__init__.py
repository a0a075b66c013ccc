"""Fretwork: structured sparsity that is fast, on CPU and NVIDIA GPUs, for PyTorch and JAX.

>>> import torch, fretwork as fw
>>> layout = fw.BlockLayout(torch.tensor([[1, 0], [1, 1]]), block=16)
>>> weights = layout.pack(torch.ones(32, 32))
>>> fw.dsd(weights, torch.ones(32, 4), layout)[[0, 16], 0].tolist()
[16.0, 32.0]
"""

import importlib.util

from fretwork import patterns
from fretwork.patterns import BlockLayout, KroneckerPattern, Pattern

__all__ = ["BlockLayout", "KroneckerPattern", "Pattern", "patterns"]
__version__ = "0.1.0"

if importlib.util.find_spec("torch") is not None:  # fretwork.jax needs no torch
    from fretwork import jit, kronecker, nn, recipes, two_four
    from fretwork.advise import advise  # functions take the places of modules in this namespace
    from fretwork.attention import alibi, attention
    from fretwork.block import block_softmax, dds, dsd, sdd
    from fretwork.block_lists import BlockLists, select_blocks
    from fretwork.conv import block_conv2d
    from fretwork.dynamic_attention import selected_attention, varlen_attention
    from fretwork.kronecker import ksmm, ksmm_chain
    from fretwork.regular import r_sddmm, r_softmax, r_spmm
    from fretwork.sparsify import sparsify
    from fretwork.structure import densify, restructure, structure
    from fretwork.two_four import TwoFour

    __all__ += [
        "advise",
        "alibi",
        "attention",
        "block_conv2d",
        "block_softmax",
        "dds",
        "dsd",
        "jit",
        "kronecker",
        "ksmm",
    ]
    __all__ += [
        "BlockLists",
        "TwoFour",
        "densify",
        "ksmm_chain",
        "nn",
        "r_sddmm",
        "r_softmax",
        "r_spmm",
        "recipes",
        "restructure",
        "sdd",
        "select_blocks",
        "selected_attention",
        "sparsify",
        "structure",
        "two_four",
        "varlen_attention",
    ]
