"""The ops on JAX arrays: under jit, grad and vmap, on CPU and CUDA.

The functions are those of `fretwork` itself; a layout or pattern is a constant of the trace, whether closed
over or an argument.

>>> import jax
>>> import jax.numpy as jnp
>>> import fretwork as fw
>>> import fretwork.jax as fwj
>>> layout = fw.BlockLayout([[1, 0], [1, 1]], block=16)
>>> weight = jnp.ones((layout.nnz, 16, 16))
>>> loss = jax.jit(lambda w, x: fwj.dsd(w, x, layout).sum())
>>> jax.grad(loss)(weight, jnp.ones((32, 5))).shape
(3, 16, 16)
"""

from fretwork._checks import needs

with needs("fretwork.jax", "jax", "jax"):
    from fretwork.jax import kronecker, two_four
from fretwork.jax.attention import alibi, attention  # the function takes the module's place in this namespace
from fretwork.jax.block import block_softmax, dds, dsd, pack, sdd, unpack
from fretwork.jax.conv import block_conv2d
from fretwork.jax.dynamic_attention import BlockLists, select_blocks, selected_attention, varlen_attention
from fretwork.jax.kronecker import ksmm, ksmm_chain
from fretwork.jax.regular import r_sddmm, r_softmax, r_spmm
from fretwork.jax.two_four import TwoFour

__all__ = [
    "BlockLists", "TwoFour", "alibi", "attention", "block_conv2d", "block_softmax", "dds", "dsd", "kronecker",
    "ksmm", "ksmm_chain", "pack", "r_sddmm", "r_softmax", "r_spmm", "sdd", "select_blocks", "selected_attention",
    "two_four", "unpack", "varlen_attention",
]  # fmt: skip
