"""Sequences and layers on many devices, through `torch.distributed`.

>>> import fretwork as fw, fretwork.distributed as fd
>>> fd.shard(fw.patterns.causal(4096), 2).ranges
[(0, 2944), (2944, 4096)]
"""

import importlib.util

from fretwork.distributed.shards import Shards, shard

__all__ = ["Shards", "shard"]

if importlib.util.find_spec("torch") is not None:  # fretwork.jax.distributed needs no torch
    from fretwork.distributed.attention import attention
    from fretwork.distributed.layers import ColwiseParallel, RowwiseParallel
    from fretwork.distributed.sequence import gather, scatter

    __all__ += ["ColwiseParallel", "RowwiseParallel", "attention", "gather", "scatter"]
