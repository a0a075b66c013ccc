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

from fretwork.jax import kronecker, two_four
from fretwork.jax.block import block_softmax, dds, dsd, pack, sdd, unpack
from fretwork.jax.conv import block_conv2d
from fretwork.jax.kronecker import ksmm, ksmm_chain
from fretwork.jax.regular import alibi, attention, r_sddmm, r_softmax, r_spmm
from fretwork.jax.two_four import TwoFour

__all__ = [
    "alibi",
    "attention",
    "block_conv2d",
    "block_softmax",
    "dds",
    "dsd",
    "ksmm",
    "ksmm_chain",
    "pack",
    "sdd",
    "unpack",
]
__all__ += ["TwoFour", "kronecker", "r_sddmm", "r_softmax", "r_spmm", "two_four", "unpack"]
