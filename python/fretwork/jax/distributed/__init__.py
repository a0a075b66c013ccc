"""Sequences on many devices, inside `jax.shard_map`.

>>> import jax, jax.numpy as jnp
>>> from jax.sharding import Mesh, PartitionSpec as P
>>> import fretwork as fw, fretwork.jax.distributed as fjd
>>> pattern, rows = fw.patterns.sliding_window(256, 31, 0), P(None, None, "seq")
>>> local = jax.shard_map(
...     lambda q, k, v: fjd.attention(q, k, v, pattern, "seq"),
...     mesh=Mesh(jax.devices(), ("seq",)), in_specs=(rows,) * 3, out_specs=rows,
... )  # fmt: skip
>>> q = k = v = jnp.ones((1, 2, 256, 16))
>>> jax.jit(local)(q, k, v).shape
(1, 2, 256, 16)
"""

from fretwork.jax.distributed.attention import attention

__all__ = ["attention"]
