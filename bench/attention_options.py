"""What a bias, ALiBi, softcap, dropout and key padding cost attention: each beside the call without, in one run.

    python bench/attention_options.py                          # causal, S = 8192, 16 heads, D = 128, bf16
    python bench/attention_options.py --peers flex,sdpa        # and torch's ways, which are compiled for each option
    python bench/attention_options.py --seq 4096 --depth 64 --options "alibi;softcap"

A rate is the time without the option over the time with it, so 1 means that it costs nothing. Backward is the gradient
of q, k and v; those called `gradient` add that of the bias, which all heads share unless said. The L2 cache is flushed
before each call. Rows go to bench/results/<device>/attention_options.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import fretwork as fw
from rows import RESULTS, Row, folder, machine, store
from timing import Call, medians

IDENTITY = ("option", "pass", "seq", "batch", "heads", "depth", "dtype", "arch")
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choices(seq: int, heads: int, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Any]]:
    """The options of fw.attention that are measured."""
    bias = torch.randn(1, heads, seq, seq, device=device, dtype=dtype)
    shared = torch.randn(1, 1, seq, seq, device=device, dtype=dtype)
    keys = torch.randn(1, 1, 1, seq, device=device, dtype=dtype)
    slopes = 2.0 ** -(8.0 * torch.arange(1, heads + 1, device=device) / heads)
    padding = (torch.arange(seq, device=device) >= seq * 7 // 8)[None]
    return {
        "none": {},
        "bias": {"bias": bias},
        "bias, shared by heads": {"bias": shared},
        "bias, fp32": {"bias": shared.float()},
        "bias of keys": {"bias": keys},
        "alibi": {"bias": fw.alibi(slopes)},
        "softcap": {"softcap": 30.0},
        "alibi, softcap": {"bias": fw.alibi(slopes), "softcap": 30.0},
        "bias, softcap": {"bias": shared, "softcap": 30.0},
        "dropout": {"dropout_p": 0.1},
        "key padding": {"key_padding_mask": padding},
        "bias, gradient": {"bias": shared.clone().requires_grad_()},
        "bias for each head, gradient": {"bias": bias.clone().requires_grad_()},
        "bias of keys, gradient": {"bias": keys.clone().requires_grad_()},
    }


def flex(given: dict[str, Any], seq: int, device: torch.device) -> Attention:
    """FlexAttention with the same score; raises for what it has no word for."""
    if given.get("dropout_p"):
        raise NotImplementedError("no dropout")
    bias, cap, padding = given.get("bias"), given.get("softcap", 0.0), given.get("key_padding_mask")
    slopes = bias.slopes if isinstance(bias, fw.alibi) else None

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        s = cap * torch.tanh(s / cap) if cap else s
        if slopes is not None:
            return s - slopes[h] * (i - j).abs()
        if bias is None:
            return s
        _, heads, rows, _ = bias.shape
        return s + bias[0, h if heads > 1 else 0, i if rows > 1 else 0, j]

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j <= i) & ~padding[0, j] if padding is not None else j <= i

    plain = bias is None and not cap
    block_mask = create_block_mask(mask, None, None, seq, seq, device=device)
    return partial(torch.compile(flex_attention, dynamic=False), score_mod=None if plain else score,
                   block_mask=block_mask)  # fmt: skip


def sdpa(given: dict[str, Any], seq: int, device: torch.device) -> Attention:
    """torch's own: a bias and padding are a matrix that is added, and it has no softcap."""
    bias, padding = given.get("bias"), given.get("key_padding_mask")
    if given.get("softcap"):
        raise NotImplementedError("no softcap")
    if isinstance(bias, fw.alibi) or (bias is not None and bias.dtype == torch.float32):
        raise NotImplementedError("the same as a bias")
    if bias is None and padding is None:
        return partial(scaled_dot_product_attention, is_causal=True, dropout_p=given.get("dropout_p", 0.0))
    at = torch.arange(seq, device=device)
    hidden = at > at[:, None] if padding is None else (at > at[:, None]) | padding
    dtype = torch.bfloat16 if bias is None else bias.dtype
    added = torch.zeros(1, 1, 1, 1, device=device, dtype=dtype) if bias is None else bias
    return partial(scaled_dot_product_attention, attn_mask=added.masked_fill(hidden, -torch.inf))


PEERS = {"flex": flex, "sdpa": sdpa}


def functions(options: argparse.Namespace, device: torch.device, left_out: Row) -> dict[str, Attention]:
    """Each option's call, "algorithm: option"."""
    made: dict[str, Attention] = {}
    pattern = fw.patterns.causal(options.seq)
    dtype = getattr(torch, options.dtype)
    for name, given in choices(options.seq, options.heads, dtype, device).items():
        if name != "none" and options.options and name not in options.options:
            continue
        made[f"ours: {name}"] = partial(fw.attention, pattern=pattern, **given)
        for peer in options.peers if "gradient" not in name else ():
            try:
                made[f"{peer}: {name}"] = PEERS[peer](given, options.seq, device)
            except NotImplementedError as error:
                left_out[f"{peer}: {name}"] = str(error)
    return made


def try_all(calls: dict[str, Call], left_out: Row) -> dict[str, Call]:
    """Those that run."""
    kept: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            call()
            kept[name] = call
        except Exception as error:  # a peer may not have the option at this size
            if name.startswith("ours"):
                raise
            left_out[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return kept


def measure(options: argparse.Namespace, device: torch.device) -> list[Row]:
    torch.manual_seed(0)
    shape = (1, options.heads, options.seq, options.depth)
    q, k, v, d_o = (torch.randn(shape, device=device, dtype=getattr(torch, options.dtype)) for _ in range(4))
    left_out: Row = {}
    calls = functions(options, device, left_out)
    rows: list[Row] = []
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for which, products in (("forward", 2), ("backward", 5)):
        runs: dict[str, Call] = {}
        if which == "forward":
            runs = {n: partial(torch.no_grad()(f), q, k, v) for n, f in calls.items() if "gradient" not in n}
        else:
            for name, f in try_all({n: partial(f, *leaves) for n, f in calls.items()}, left_out).items():
                o = f()
                wanted = [*leaves, calls[name].keywords["bias"]] if "gradient" in name else leaves  # type: ignore[attr-defined]
                runs[name] = partial(torch.autograd.grad, o, wanted, d_o, retain_graph=True)
        ms = medians(try_all(runs, left_out), device, seconds=options.seconds)
        flops = products * options.heads * options.seq * (options.seq + 1) * options.depth
        for name in dict.fromkeys(n.split(": ")[1] for n in ms):
            why = {n.split(": ")[0]: text for n, text in left_out.items() if n.endswith(f": {name}")}
            times = {n.split(": ")[0]: t for n, t in ms.items() if n.split(": ")[1] == name}
            rows.append({"option": name, "pass": which, "seq": options.seq, "batch": 1, "heads": options.heads,
                         "depth": options.depth, "dtype": options.dtype, "ms": times,
                         "tflops": {a: flops / t / 1e9 for a, t in times.items()},
                         "rate": {a: ms[f"{a}: none"] / t for a, t in times.items() if f"{a}: none" in ms},
                         "left_out": why})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--options", type=lambda s: s.split(";") if s else [], default=[], help="names, split by ;")
    parser.add_argument("--peers", type=lambda s: s.split(",") if s else [], default=[], help="flex,sdpa")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    facts = machine(device)
    rows = [{**facts, **row} for row in measure(options, device)]
    store(folder(options.out, facts) / "attention_options.json", rows, IDENTITY)
    print(f"| {'option':<24} | pass | ms | TFLOP/s | rate | peers, ms |\n|---|---|---|---|---|---|")
    for row in rows:
        peers = ", ".join(f"{a} {t:.3f}" for a, t in row["ms"].items() if a != "ours")
        print(f"| {row['option']:<24} | {row['pass']} | {row['ms']['ours']:.3f} | {row['tflops']['ours']:.0f} "
              f"| {row['rate']['ours']:.2f} | {peers} |")  # fmt: skip


if __name__ == "__main__":
    main()
