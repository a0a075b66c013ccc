"""Writes docs/patterns.md and its pictures: every named pattern, its rule, a picture, its density and measured speed.

`patterns_page.py PROGRAM` writes them with the command-line program given; with `--check` it fails where what is
written is out of date.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import fretwork as fw

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench/results/h200/attention.json"

HEAD = """# Patterns

A pattern says which keys a query attends to. It is an immutable value. Patterns are equal if their texts are equal,
and one takes a few hundred bytes, however long the sequence is. `seq` is S or (Sq, Sk). Query i has position p = i +
offset. By default queries are the last positions (offset = Sk − Sq); every pattern with `seq` accepts another
`offset=` as a keyword.

```python
import fretwork as fw

p = fw.patterns.sliding_window(65536, 511, 0) | fw.patterns.dilated(65536, 64, 512, True)  # a union
print(p.nnz, p.density, p.text)
print(p.describe())  # what was recognised, and what attention costs on a GPU
print(p.contains(6000, 6000 - 5 * 512))
small = fw.patterns.sliding_window(12, 2, 0) | fw.patterns.dilated(12, 2, 4, True)
print(small.mask().int())
```
`|` is the union, `&` the intersection, `.T` exchanges queries and keys. `fw.Pattern.parse(text)` makes a pattern from
its text, and `fretwork show 'sliding_window(4096,255,0) | dilated(4096,8,256)'` draws one in the terminal (`--png`,
`--svg`). To save a pattern, save its text; pickle, `torch.save` and `torch.load` work too. `p.columns()` lists the
keys of each row, ascending, padded with −1. If every row is one arithmetic progression, `p.acsr()` returns (start,
stride, count) of each row. In the pictures below, queries run downwards and keys to the right.

Patterns can be built from others. `p[8:, :100]` is a slice, `place` puts a pattern into a larger, empty one, `diag`
puts several along the diagonal, and `with_prefix` adds tokens in front that attend to all and are attended to by all,
such as a ViT's class token. These operations never make a dense mask: a slice of a million tokens costs as much as its
pattern. `p.show()` draws in the terminal, and a notebook shows a pattern as a picture.
```python
import torch, fretwork as fw

image = fw.patterns.with_prefix(fw.patterns.neighborhood((24, 24), 7), 1)  # a class token before 576 patches
packed = fw.patterns.diag([image, fw.patterns.causal(100)])  # beside a text of 100 tokens
q, k, v = (torch.randn(1, 2, 677, 32) for _ in range(3))
whole = fw.attention(q, k, v, packed)
last = fw.attention(q[:, :, 500:], k, v, packed[500:])  # some of the queries, with their own rows of the pattern
print((whole[:, :, 500:] - last).abs().max())
packed.show(width=60)
```

Positions on a grid are row-major: the last axis counts fastest. Arguments that belong to an axis are one number for
all axes or a tuple with one for each: `window`, `dilation`, `causal` and `stride` of `neighborhood`, `tile` and
`window` of `sliding_tile`, `window` and `shift` of `swin`. An even window has its extra position on the left: a window
of 4 is two positions before p, p, and one after it. Near an edge the window is shifted inwards, so every query has
`window` positions; a causal axis has fewer at its beginning. Windows of `swin` and tiles of `sliding_tile` that do not
divide the grid are truncated at its end. Lists (`globals`, `vertical`, `slash`, `lengths`, `parents`, …) are any
sequences or arrays of integers, ranges too (in a text as well: `longformer(4096,256,range(64))`).

Internally a pattern is a few parts: boxes on the digits of positions. A window is a band in plain order, a dilated
window is a band in each residue class, and a neighbourhood is a band on each axis of a grid. Counting and intersecting
work on the ends of these bands, so nothing grows with the square of a length. Patterns without such a form (random
blocks, explicit masks) are stored as lists. Grids whose steps do not divide each other, and strides whose common
multiple exceeds 4096, are united element by element, up to 2^28 elements in 2^25 runs. For wide dilations that are
coprime this allows some hundred thousand tokens, but not a million.

`from_mask` reads its matrix once. It finds rectangles, triangles, bands and diagonals in plain order. If a distance
between the runs of a row or between parts is frequent, it finds them in the residue classes of that distance too:
strides, dilations, blocks, grids of two axes, documents. Everything else is stored as a list, run by run for random
rows. A tile of random bits that repeats elsewhere is listed each time. This costs memory in the pattern (about 300
bytes per part) but not in attention, whose plan stores each distinct tile of bits once. `describe()` says what was
found.

## Use
```python
import torch, fretwork as fw

q = torch.randn(1, 4, 512, 64, requires_grad=True)
k, v = (torch.randn(1, 2, 512, 64, requires_grad=True) for _ in range(2))  # two query heads share each
near, far = fw.patterns.sliding_window(512, 63, 0), fw.patterns.strided(512, 32)
fw.attention(q, k, v, near | far).sum().backward()  # one pattern for all heads
o, lse = fw.attention(q, k, v, [near, near, far, far], return_lse=True)  # or one for each
last = fw.attention(q[:, :, -1:], k, v, fw.patterns.sinks((1, 512), 4, 128))  # decoding: one query, all keys
slopes = fw.alibi(0.5 ** torch.arange(1, 5))  # or a tensor that broadcasts to (B, Hq, Sq, Sk)
fw.attention(q, k, v, near, bias=slopes, softcap=30.0, scale=0.1, dropout_p=0.1)
sinks = torch.zeros(4, requires_grad=True)  # learned: one more score for each query of a head, without a value
fw.attention(q, k, v, near, sinks=sinks).sum().backward()

q, k, v = (t.detach().expand(2, -1, -1, -1) for t in (q, k, v))  # a batch of two
lengths = torch.tensor([512, 300])
padding = torch.arange(512) >= lengths[:, None]  # (B, Sk), True: not seen
fw.attention(q, k, v, near, key_padding_mask=padding)
fw.attention(q, k, v, [[near], [near, near, far, far]])  # patterns of each element, one or one for each head
lists = fw.select_blocks(q, k, top_k=3, block=64)  # counts (2, 2, 8) and indices (2, 2, 8, 3), for each key head
```
Keys that are True in `key_padding_mask` are excluded, even if they or their values are NaN, and their gradients are
zeros. A query without any remaining key gives zeros and a log-sum-exp of −inf. Tiles without padding run as they do
without a mask. On Hopper the forward pass and the gradient of queries skip tiles that are all padding. A finite bias
never excludes a key, however negative it is: if all keys of a row have a bias of −1e30, the row is their softmax. Only
−inf excludes a key.

`sinks` (Hq,) adds exp(sinks[h]) to the softmax denominator of each query of head h, so that a head may attend to
nothing. lse includes it. It is neither scaled nor capped nor dropped. A query without keys gives zeros, and the sink as
its lse. Hugging Face models with such sinks (gpt-oss) pass them on as `s_aux`. Without a pattern, `fw.attention(q, k,
v)` sees every key.

`fw.select_blocks` finds the key blocks with the best scores for each block of queries, on the device. The score is the
product of the blocks' means. The result is `fw.BlockLists`, counts and indices as FlexAttention has them; nothing is
read on the host.

Only the pattern's scores are computed, forward and backward, on CPU and GPU. `fretwork.jax.attention` is the same in
JAX; a pattern that is an argument of a function under `jax.jit` is a constant of the trace. In `examples/`,
`custom_pattern.py` makes, draws and times a new pattern; `longformer_block.py` and `vision_neighborhood.py` train with
patterns, and so do [others](examples.md).

### Lengths that change
A pattern is a constant of a compiled graph. Under `torch.compile`, a pattern made from a tensor's shape is recompiled
for each length, also with `dynamic=True`. Give a function instead, and one graph serves all lengths, because the
function is called when the graph runs.
```python
import torch, fretwork as fw


def near(rows, cols):  # of (Sq, Sk); or a list with one for each head
    return fw.patterns.sinks((rows, cols), 4, 128)


@torch.compile(dynamic=True, backend="aot_eager")
def attend(q, k, v):
    return fw.attention(q, k, v, near)


for length in (300, 500, 700):
    x = torch.randn(1, 2, length, 32)
    attend(x, x, x)
```
This works for functions (`def` or `lambda`), for layers with such patterns, and for calls without a pattern, also with
`blocks`. Define the function outside of the compiled code, or let it use nothing but the lengths. Other callable
objects are recompiled for each length. `torch.export` keeps the pattern of the example's length; import fretwork before
a saved program is loaded, because that registers its ops.

JAX compiles for each shape in any case. An exported function calls Fretwork's library: allow its targets (the error
names them), and import `fretwork.jax` before a saved function is loaded. `serialize()` needs the package flatbuffers.
```python
import jax, jax.export, jax.numpy as jnp
import fretwork as fw
import fretwork.jax as fj

pattern = fw.patterns.causal(64)
function = jax.jit(lambda x: fj.attention(x, x, x, pattern))
x = jnp.ones((1, 2, 64, 16))
allowed = [jax.export.DisabledSafetyCheck.custom_call("fretwork_attention")]
exported = jax.export.export(function, disabled_checks=allowed)(x)
print(jnp.abs(exported.call(x) - function(x)).max())
```

### As a layer
`fw.nn.MultiheadAttention` is `torch.nn.MultiheadAttention` with a pattern. It has the same parameters, state-dict keys
and call, so a checkpoint loads, and `from_dense` converts a layer. The pattern is one for all heads, a list with one
for each, or a function of (Sq, Sk), which serves every length. It works in torch's encoder and decoder layers. In eval
mode torch's layers have a fast path that computes dense attention without calling the module; it is disabled for this
layer. A `TransformerEncoder` of such layers warns that it will not use nested tensors; `enable_nested_tensor=False`
silences the warning.
```python
import torch, fretwork as fw

layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
layer.self_attn = fw.nn.MultiheadAttention.from_dense(layer.self_attn, fw.patterns.sliding_window(512, 64, 64))
x, padding = torch.randn(2, 512, 64), torch.arange(512) >= torch.tensor([[512], [300]])
layer.eval()(x, src_key_padding_mask=padding)

attn = fw.nn.MultiheadAttention(64, 4, lambda sq, sk: fw.patterns.sinks((sq, sk), 4, 128), num_kv_heads=2)
out, _ = attn(x, is_causal=True)  # pattern & causal
last, _ = attn(x[:, -1:], x)  # one query, all keys: it is the last position
assert torch.allclose(last, out[:, -1:], atol=1e-5)
```
As in torch, True in `key_padding_mask` and `attn_mask` excludes a key, and floats are added to the scores. Do not pass
a mask that the pattern or `is_causal` already implies: reading it costs time. A query without any key gives the output
bias, not NaN. Attention weights are not stored, so `need_weights=True` is refused. Flax's own layer uses a pattern
through its `attention_fn`: `examples/flax_sparse_mhsa.py`.

### In Hugging Face models
Hugging Face models read a pattern from their configuration: a text with `{seq}` for the lengths, one for all layers or
a list with one for each. Without a pattern a model keeps its own attention:
```python
import torch, fretwork.compat.transformers  # registers "fretwork"
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(**sizes, fretwork_pattern=["sliding_window({seq}, 511, 0)", "strided({seq}, 64)"])
model = AutoModelForCausalLM.from_config(config)  # a pattern means attn_implementation="fretwork"
print(model(torch.randint(64, (1, 700))).logits.shape)
```
For trained weights, call `model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fretwork")` and set
`model.config.fretwork_pattern = "strided({seq}, 128)"`. The pattern is saved and restored with the model. Positions
count from the first real token of a row. So a padded row has the same results as the row alone, also for patterns that
depend on positions (`sinks`, `fixed`, …); rows with different padding are then computed in groups. Growing and static
key caches are supported. Packed sequences (position ids that begin anew, or `cu_seq_lens_q`) are documents of their
own, learned sinks (gpt-oss) count, and a function may choose key blocks in each layer
([`use_blocks`](dynamic-sparsity.md#hugging-face)); the module's docstring lists what is not supported.

### Scores, softmax and product apart
If you need the scores, there are three operators, those of the SPLAT paper on regular sparsity, for every pattern and
with gradients. `r_sddmm` computes packed scores (entry t of row i is key `p.columns()[i, t]`), `r_softmax` normalises
them, and `r_spmm` multiplies them by the values. All rows are as wide as the widest one: a single query that attends
to all keys makes scores of (B, H, Sq, Sk). `block_cover` returns the blocks that a pattern touches, for the operators
of [block sparsity](block-sparsity.md), and the share of their elements that are not in the pattern.
```python
import torch, fretwork as fw

q, k, v = (torch.randn(1, 2, 256, 32) for _ in range(3))
p = fw.patterns.strided(256, 16)
scores = fw.r_sddmm(q, k, p)  # (1, 2, 256, 31): a row has up to 31 keys
weights = fw.r_softmax(scores, p, scale=32**-0.5)
print((fw.r_spmm(weights, v, p) - fw.attention(q, k, v, p)).abs().max())
print(weights[0, 0, 100], p.columns()[100])  # and their keys

layout, fill_in = p.block_cover(32)
print(layout, f"{fill_in:.0%} of the blocks' elements are not the pattern's")
print(fw.sdd(q[:, :1], k[:, :1], layout, trans_b=True).shape)  # scores of one head, in whole blocks
```

### What a pattern costs
The cost is the number of scores, rounded up to dense tiles in the order that suits the pattern. Keys at a fixed
distance cost as much as neighbouring keys; a patch of a grid costs as much as a window. Bands narrower than a tile
cost more than their scores, and so do parts that need an order of their own (strided has two). The parts of a union
may overlap: every score is computed once. Make a pattern once and keep it: equal patterns share their plans.

The same elements may cost more if they are written in another way. Strides are recognised if a pattern states them as
strides, not among the columns of `vertical_slash` or the globals of `longformer`, and `from_mask` may choose a
distance that fits less well. If `describe()` says that tiles hold many times the elements, write the pattern as a
union of its parts. In fp32 on a CPU, one query against all keys takes longer than in torch.

A pattern made inside a function that `torch.compile` traces is a constant of the graph; other sizes are recompiled.
`fretwork bench attention --seq 4096 --pattern 'strided(4096,64)'` measures a pattern on your machine, with `--explain`
it says [which kernels](design.md#how-a-kernel-is-chosen) could run it on a GPU, and [measurements](benchmarks.md)
compare all named ones with other libraries.

## Gallery
"""


class Entry(NamedTuple):
    name: str
    form: str
    rule: str
    picture: str
    example: str  # the call that is measured, as Python; or, where there is a space at its front, in words


ENTRIES = [
    Entry("full", "full(seq)", "always", "full(64)", "full(16384)"),
    Entry("causal", "causal(seq)", "j ≤ p", "causal(64)", "causal(16384)"),
    Entry("sliding_window", "sliding_window(seq, left, right)", "−left ≤ j − p ≤ right; None is unlimited",
          "sliding_window(64,12,4)", "sliding_window(16384, 512, 512)"),
    Entry("dilated", "dilated(seq, window, dilation, causal=False)",
          "|p − j| ≤ window·dilation, and p − j a multiple of dilation (and j ≤ p)",
          "dilated(64,4,4)", "dilated(16384, 512, 4)"),
    Entry("strided", "strided(seq, stride)", "j ≤ p, and p − j < stride or a multiple of it (Child et al.)",
          "strided(64,8)", "strided(16384, 128)"),
    Entry("fixed", "fixed(seq, stride, summary)",
          "j ≤ p, and the same block of `stride`, or j among the last `summary` of its block (Child et al.)",
          "fixed(64,8,2)", "fixed(16384, 128, 16)"),
    Entry("longformer", "longformer(seq, window, globals)", "|p − j| ≤ window, or p or j is global",
          "longformer(64,5,[0,1,40])", "longformer(16384, 512, range(64))"),
    Entry("bigbird", "bigbird(seq, block, window, globals, random, seed=0)",
          "on blocks P, J: |P − J| ≤ window, or P < globals, or J < globals, or J one of `random` drawn for P among "
          "the others, or all of these if there are fewer", "bigbird(64,4,1,1,2)",
          "bigbird(16384, 64, 1, 2, 3, seed=5)"),
    Entry("block_local", "block_local(seq, block, previous=0)", "0 ≤ ⌊p/block⌋ − ⌊j/block⌋ ≤ previous",
          "block_local(64,12,previous=1)", "block_local(16384, 1024)"),
    Entry("block_causal", "block_causal(seq, block)", "⌊j/block⌋ ≤ ⌊p/block⌋", "block_causal(64,12)",
          "block_causal(16384, 1024)"),
    Entry("swin", "swin(height, width, window, shift=0)",
          "the same window after a cyclic shift by −shift on both axes, and the same side of the wrap",
          "swin(8,8,4,shift=2)", "swin(128, 128, 16, shift=8)"),
    Entry("axial", "axial(height, width)", "the same row or the same column of a grid", "axial(8,8)",
          "axial(128, 128)"),
    Entry("neighborhood", "neighborhood(shape, window, dilation=1, causal=False, stride=1)",
          "on each of one to three axes: j among the `window` positions of p's residue class around p, shifted to stay "
          "inside; on a causal axis those that end at p; `stride` positions of a class share the window of the middle "
          "one, on a causal axis of the last one", "neighborhood((8,8),3)", "neighborhood((128, 128), 13)"),
    Entry("sliding_tile", "sliding_tile(shape, tile, window)", "a neighbourhood of `window` tiles, on tile coordinates",
          "sliding_tile((8,8),2,3)", "sliding_tile((128, 128), 8, 3)"),
    Entry("longnet", "longnet(seq, segments, rates, head=0)",
          "for some (w, r): ⌊p/w⌋ = ⌊j/w⌋ and p ≡ j ≡ head (mod r)", "longnet(64,[8,32],[1,4])",
          "longnet(16384, [2048, 4096, 8192], [1, 2, 4])"),
    Entry("document", "document(lengths, causal=False)", "the same document (and j ≤ p)",
          "document([20,8,30,6],causal=True)", "document([5461, 2340, 3276, 1820, 3487], causal=True)"),
    Entry("tree", "tree(parents)", "j is p or one of its ancestors; parents[p] < p, −1 for a root",
          "tree([-1,0,1,2,3,4,5,5,5,6,6,7,8,9,9,10,11,12,12,13,14])",
          "tree([n - 1 if n < 14336 else max(14335, n - 4) for n in range(16384)])"),
    Entry("prefix_lm", "prefix_lm(seq, prefix)", "j < prefix or j ≤ p", "prefix_lm(64,20)", "prefix_lm(16384, 2048)"),
    Entry("sinks", "sinks(seq, sinks, window)", "j ≤ p, and j < sinks or p − j < window (StreamingLLM)",
          "sinks(64,4,12)", "sinks(16384, 64, 1024)"),
    Entry("vertical_slash", "vertical_slash(seq, vertical, slash)",
          "j ≤ p, and j ∈ vertical or p − j ∈ slash (MInference)",
          "vertical_slash(64,[0,1,20],[0,1,2,17,33])",
          "vertical_slash(16384, range(0, 16384, 256), [*range(256), 1024, 2048, 4095])"),
    Entry("band", "band(seq, start, stride, count)", "j = p + start + t·stride, 0 ≤ t < count", "band(64,-20,5,4)",
          "band(16384, -1024, 2, 512)"),
    Entry("from_layout", "from_layout(layout, head=0)", "the blocks of one head of a `BlockLayout`",
          "from_layout(block((1,8,8),(8,8),~JMYEkCMACJB))", " 128×128 blocks of 128, one in ten of them"),
    Entry("from_mask", "from_mask(mask)",
          "mask[i, j]: bands, rectangles and repeated distances are found in it, the rest is listed",
          "from_mask((8,8),~BCECIQgCEEB)", " a window of ±128 and 512 rectangles of up to 256 a side"),
    Entry("from_block_mask", "from_block_mask(block_mask)",
          "a full block of FlexAttention's BlockMask has it, or a partial one whose `mask_mod` says so",
          "from_runs((24,24),[(0,24,0,24,-23,0),(0,9,12,20,4,19)])", " what `create_block_mask` makes of a function"),
    Entry("acsr", "acsr(start, stride, count, cols)", "j = start[i] + t·stride[i], 0 ≤ t < count[i]",
          "acsr([0,3,6,1,9,2,0,5],[1,2,3,4,1,5,2,3],[9,6,4,4,3,3,8,4],18)",
          " 512 keys that end at p, 1, 2, 3 or 4 apart in turn, each for 512 rows"),
    Entry("slice", "p[8:, :100]", "p has it, counted from the slice's first row and column", "strided(64,8)[20:60,8:]",
          " a slice of a pattern"),
    Entry("place", "place(p, (rows, cols), at=(0, 0))", "p has (i − at[0], j − at[1])",
          "place(axial(6,8),(64,56),at=(10,4))", "place(causal(8192), (16384, 16384), at=(4096, 2048))"),
    Entry("diag", "diag([p1, p2])", "p and j belong to the same pattern of the list, which has it",
          "diag([causal(20),strided(28,6),full((16,10))])", "diag([causal(8192), strided(8192, 128)])"),
    Entry("with_prefix", "with_prefix(p, n)", "p < n or j < n, or the pattern has (p − n, j − n)",
          "with_prefix(neighborhood((6,10),3),4)", "with_prefix(sliding_window(16320, 512, 512), 64)"),
]  # fmt: skip


def made(example: str) -> fw.Pattern:
    """The pattern of an example."""
    return eval(example, {"range": range, **vars(fw.patterns)})


def speed(entry: Entry, rows: list[dict[str, Any]]) -> str:
    """The call that stands for a pattern, its density, and what was measured of it on an H200, forward and backward."""
    of = {row["pass"]: row for row in rows if row["call"] == entry.name}
    row = next(iter(of.values()), None)
    words, density = entry.example.startswith(" "), row["density"] if row else 0.0
    if not words:
        density = made(entry.example).density
    said = f"{entry.example.strip()}: " if words else f"`{entry.example}` has "
    said = said[0].upper() + said[1:] + f"{100 * density:.3g} % of all pairs.\n" if row or not words else ""
    if row is None:
        return said
    parts = []
    for which, one in of.items():
        peers = {name: ms for name, ms in one["ms"].items() if name != "ours"}
        best = min(peers, key=lambda name: peers[name], default=None)
        beside = f" ({best} {peers[best]:.3g})" if best else ""
        parts.append(f"{which} {one['ms']['ours']:.3g} ms{beside}")
    # Older rows may be of another call.
    other = "" if abs(row["density"] - density) < 1e-9 else f"{row['text'] or 'one'} of {100 * row['density']:.3g} %, "
    sizes = f"{other}{row['heads']} heads, S = {row['seq']:,}, D = {row['depth']}, {row['dtype']}"
    return said + f"On an H200, {sizes}: {', '.join(parts)}.\n"


def measured() -> list[dict[str, Any]]:
    """The rows that stand for their patterns: the first one measured of each call, at one size."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    usual = {"part": "pattern", "arch": "auto", "dtype": "bfloat16", "seq": 16384, "depth": 128}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if all(row.get(key) == value for key, value in usual.items()) and row.get("flex", "plain") == "plain":
            found.setdefault((row["call"], row["pass"]), row)
    return list(found.values())


def page() -> str:
    """The text of docs/patterns.md."""
    rows = measured()
    text = HEAD + "| pattern | key j allowed iff |\n|---|---|\n"
    for entry in ENTRIES:
        rule = entry.rule.replace("|", "\\|")
        text += f"| [`{entry.name}`](#{entry.name}) | {rule} |\n"
    for entry in ENTRIES:
        text += f"\n## {entry.name}\n`{entry.form}`: {entry.rule}.\n\n![{entry.picture}](patterns/{entry.name}.svg)\n\n"
        text += f"Drawn: `{entry.picture}`. {speed(entry, rows)}".rstrip() + "\n"
    return text


def main() -> int:
    program, check = sys.argv[1], "--check" in sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        made = {DOCS / "patterns.md": page().encode()}
        for entry in ENTRIES:
            picture = Path(folder) / f"{entry.name}.svg"
            subprocess.run([program, "show", entry.picture, "--svg", picture], check=True, stdout=subprocess.DEVNULL)
            made[DOCS / "patterns" / picture.name] = picture.read_bytes()
    if check:
        old = [str(file) for file, data in made.items() if not file.exists() or file.read_bytes() != data]
        print("\n".join(f"out of date: {file}" for file in old))
        return 1 if old else 0
    (DOCS / "patterns").mkdir(exist_ok=True)
    for file, data in made.items():
        file.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
