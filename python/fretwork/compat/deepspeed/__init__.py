"""DeepSpeed's sparse attention by its names: its sparsity configurations, products, softmax and self-attention.

`from fretwork.compat.deepspeed import FixedSparsityConfig, SparseSelfAttention` in place of
`from deepspeed.ops.sparse_attention import …`; `matmul` and `softmax` are submodules, as there. With DeepSpeed
installed, `install()` puts this package in the place of `deepspeed.ops.sparse_attention`.

>>> layout = FixedSparsityConfig(num_heads=1, block=16, attention="unidirectional").make_layout(96)
>>> layout[0, 5].tolist()
[0, 0, 0, 1, 1, 1]

Layouts are DeepSpeed's, but for blocks of the future: where a unidirectional configuration of DeepSpeed sees a later
block (`FixedSparsityConfig` with num_global_blocks > 1, `VariableSparsityConfig` with global_block_end_indices or
random blocks), this one does not. On the diagonal a block is seen whole, so that causal attention needs an attention
mask beside the layout, here as there.
"""

import importlib
import sys

from fretwork.compat.deepspeed import matmul, softmax
from fretwork.compat.deepspeed.matmul import MatMul
from fretwork.compat.deepspeed.softmax import Softmax
from fretwork.compat.deepspeed.sparse_self_attention import SparseSelfAttention
from fretwork.compat.deepspeed.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "install",
    "matmul",
    "softmax",
]

_SUBMODULES = ["matmul", "softmax", "sparse_self_attention", "sparsity_config"]


def install(name: str = "deepspeed.ops.sparse_attention") -> None:
    """Makes imports of DeepSpeed's package, and of its submodules, find this one in this process.

    DeepSpeed itself has to be installed. Call it before the code that imports the names.
    """
    parent, _, last = name.rpartition(".")
    here = sys.modules[__name__]
    setattr(importlib.import_module(parent), last, here)
    sys.modules[name] = here
    for submodule in _SUBMODULES:
        sys.modules[f"{name}.{submodule}"] = importlib.import_module(f"{__name__}.{submodule}")
