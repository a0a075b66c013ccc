"""Multi-head self-attention in JAX, its softmax over all keys swapped for a pattern's: one line changes.

The layer is a function of its parameters, so it fits any library of layers (flax_sparse_mhsa.py swaps it into Flax's
own). Jit, grad and vmap go through.

python examples/jax_sparse_mhsa.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

import fretwork as fw
import fretwork.jax as fj

WIDTH, HEADS = 64, 2
Params = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    scores = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def mhsa(params: Params, x: jax.Array, attend: Attend) -> jax.Array:
    """x (B, S, WIDTH) → the same; `attend` takes and gives (B, H, S, D)."""
    batch, seq, width = x.shape
    heads = (x @ params["qkv"]).reshape(batch, seq, 3, HEADS, width // HEADS).transpose(2, 0, 3, 1, 4)
    o = attend(*heads)
    return o.transpose(0, 2, 1, 3).reshape(batch, seq, width) @ params["out"]


def initial(key: jax.Array) -> Params:
    one, two = jax.random.split(key)
    shape = (WIDTH, 3 * WIDTH)
    return {"qkv": jax.random.normal(one, shape) / 8, "out": jax.random.normal(two, (WIDTH, WIDTH)) / 8}


def loss_of(params: Params, x: jax.Array, want: jax.Array, attend: Attend) -> jax.Array:
    return jnp.mean((mhsa(params, x, attend) - want) ** 2)


def train(name: str, attend: Attend, teach: Attend, options: argparse.Namespace) -> None:
    """Learns what a layer with other parameters does, by Adam."""
    step = jax.jit(jax.value_and_grad(partial(loss_of, attend=attend)))
    teacher = jax.jit(partial(mhsa, initial(jax.random.key(7)), attend=teach))
    params = initial(jax.random.key(0))
    mean = square = jax.tree.map(jnp.zeros_like, params)
    losses, times = [], []
    for n in range(1, options.steps + 1):
        x = jax.random.normal(jax.random.key(n), (options.batch, options.seq, WIDTH))
        want = teacher(x)
        began = time.perf_counter()
        loss, gradient = jax.block_until_ready(step(params, x, want))
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(float(loss))
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
        rate = 5e-3 * (1 - 0.99**n) ** 0.5 / (1 - 0.9**n)
        params = jax.tree.map(lambda p, m, s, r=rate: p - r * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    ms = sorted(times[1:] or times)[len(times) // 2 - 1]
    print(f"{name:10} {ms:9.1f} {losses[0]:14.4f} {losses[-1]:9.4f}", flush=True)


def main(options: argparse.Namespace) -> None:
    pattern = fw.patterns.sinks(options.seq, 4, 64)
    masked = partial(dense, mask=jnp.asarray(pattern.numpy_mask().astype(bool)))
    sparse = lambda q, k, v: fj.attention(q, k, v, pattern)  # noqa: E731  the line that changes
    x = jax.random.normal(jax.random.key(0), (options.batch, options.seq, WIDTH))
    params = initial(jax.random.key(0))
    want = jax.jit(partial(mhsa, attend=masked))(params, x)
    error = jnp.abs(jax.jit(partial(mhsa, attend=sparse))(params, x) - want).max()
    print(f"{pattern.text}, density {pattern.density:.4f}; error against the masked layer {error:.1e}")
    print("attention  ms a step  loss at first   at last")
    train("all keys", dense, masked, options)
    train("masked", masked, masked, options)
    train("sparse", sparse, masked, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args())
