"""Flax's own multi-head attention over a pattern: `attention_fn` is all that changes, parameters stay as they are.

pip install flax, then: python examples/flax_sparse_mhsa.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import fretwork as fw
import fretwork.jax as fj

WIDTH, HEADS = 64, 2


Patterns = fw.Pattern | Sequence[fw.Pattern]


def sparse(pattern: Patterns | Callable[[int, int], Patterns]) -> Callable[..., jax.Array]:
    """An `attention_fn` in which queries see the keys of a pattern: one, one for each head, or a function of (Sq, Sk).

    A mask, True where a key is seen, hides more, such as padding. Flax has (B, S, H, D), Fretwork (B, H, S, D).
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: Any = None, mask: Any = None, *,
               dropout_rng: Any = None, dropout_rate: float = 0.0, deterministic: bool = False,
               **_: Any) -> jax.Array:  # fmt: skip
        if mask is not None:
            hidden = jnp.where(mask, 0, -jnp.inf).astype(query.dtype)
            bias = hidden if bias is None else bias + hidden
        q, k, v = (x.swapaxes(1, 2) for x in (query, key, value))
        seen = pattern(q.shape[2], k.shape[2]) if callable(pattern) else pattern
        rate = 0.0 if deterministic else dropout_rate
        return fj.attention(q, k, v, seen, bias=bias, dropout_p=rate, dropout_key=dropout_rng).swapaxes(1, 2)

    return attend


class Block(nn.Module):
    """Attention and a small MLP, both with a way around them."""

    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(y, mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


def train(name: str, block: Block, mask: jax.Array | None, options: argparse.Namespace) -> None:
    """Learns to repeat what stood 32 tokens before, by plain gradient descent."""
    x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, WIDTH))
    params = block.init(jax.random.key(0), x, mask)

    @jax.jit
    def step(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((block.apply(params, x, mask) - jnp.roll(x, 32, 1)) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)

    losses, times = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        loss, params = jax.block_until_ready(step(params, x))
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(float(loss))
    print(f"{name:8} {sorted(times)[len(times) // 2]:9.1f} {losses[0]:14.5f} {losses[-1]:9.5f}", flush=True)


def main(options: argparse.Namespace) -> None:
    pattern = fw.patterns.sinks(options.seq, 4, 64)
    mask = jnp.asarray(pattern.numpy_mask().astype(bool))[None, None]
    plain, block = Block(), Block(sparse(pattern))
    x = jax.random.normal(jax.random.key(1), (options.batch, options.seq, WIDTH))
    params = plain.init(jax.random.key(0), x)
    error = jnp.abs(block.apply(params, x) - plain.apply(params, x, mask)).max()
    print(f"{pattern.text}, density {pattern.density:.4f}; error against the masked block {error:.1e}")
    every = Block(sparse(lambda rows, cols: fw.patterns.sinks((rows, cols), 4, 64)))  # for sequences of any length
    padded = jnp.arange(options.seq)[None, None, None] < options.seq // 2
    error = jnp.abs(every.apply(params, x, padded) - plain.apply(params, x, mask & padded))
    print(f"the same with the second half as padding: error {error[:, : options.seq // 2].max():.1e}")
    print("block    ms a step  loss at first   at last")
    train("masked", plain, mask, options)
    train("sparse", block, None, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args())
