"""What the training examples share: a transformer, text to read, the loop with its measurements, and the picture."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler, which measures memory, prints lines of its own
ROOT = Path(__file__).resolve().parents[1]
SYMBOLS = 128  # ASCII; the last one stands for all others
POINTS = 5  # of a curve in the table

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Draw = Callable[[bool], tuple[Tensor, Tensor]]


class Block(nn.Module):
    """A transformer block; `attend(q, k, v)` is its attention, on (batch, heads, tokens, features)."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CharacterModel(nn.Module):
    """Says for each character which one comes next."""

    def __init__(self, seq: int, width: int, layers: int, attend: Attend = causal, heads: int = 4) -> None:
        super().__init__()
        angles = torch.arange(seq)[:, None] * torch.logspace(0, -3, width // 2)
        self.places: Tensor
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
        self.characters = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, SYMBOLS))

    def forward(self, ids: Tensor) -> Tensor:
        return self.answer(self.blocks(self.characters(ids) + self.places[: ids.shape[1]]))


def text_of_the_docs(batch: int, seq: int, device: torch.device) -> Draw:
    """Passages of this project's own pages, and the same one character later. The last tenth is held out."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("src/ops/*/README.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    ids = torch.tensor([min(ord(c), SYMBOLS - 1) for c in text], device=device)
    border = len(ids) * 9 // 10

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        first, end = (border, len(ids)) if held_out else (0, border)
        begins = torch.randint(first, end - seq, (batch, 1), device=device)
        passages = ids[begins + torch.arange(seq + 1, device=device)]
        return passages[:, :-1], passages[:, 1:]

    return draw


@dataclass
class Run:
    """What one model did."""

    name: str
    parameters: int
    ms: float  # median of a step
    mib: float  # at the peak of a step
    losses: list[float]
    held_out: float  # the loss on what it was not trained on


def loss_of(model: nn.Module, drawn: tuple[Tensor, Tensor], bf16: bool) -> Tensor:
    x, answers = drawn
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        said = model(x)
    return F.cross_entropy(said.flatten(0, -2).float(), answers.flatten())


def train(
    name: str, model: nn.Module, draw: Draw, steps: int, rate: float = 2e-3, bf16: bool | None = None, first: int = 0
) -> Run:
    """Trains, in bf16 on a GPU unless told. All models with the same `first` are shown the same data."""
    device = next(model.parameters()).device
    bf16 = device.type == "cuda" if bf16 is None else bf16
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    losses, times = [], []
    torch.manual_seed(1 + first)

    def step() -> float:
        loss = loss_of(model, draw(False), bf16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # no gradients between steps
        return loss.item()  # waits for a GPU

    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step())
        schedule.step()
        times.append((time.perf_counter() - began) * 1e3)
    held_out = evaluate(model, draw, bf16)
    kept = [*model.parameters(), *model.buffers()]
    kept += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    mib = (sum(t.nbytes for t in kept) + peak_of(step, device)) / 2**20  # one step more, which changes nothing above
    parameters = sum(p.numel() for p in model.parameters())
    return Run(name, parameters, statistics.median(times[1:] or times), mib, losses, held_out)


def evaluate(model: nn.Module, draw: Draw, bf16: bool, draws: int = 8) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return statistics.mean(loss_of(model, draw(True), bf16).item() for _ in range(draws))


def peak_of(step: Callable[[], float], device: torch.device) -> int:
    """The most bytes that torch holds during a step beyond those it held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return max((e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]"), default=0)


def table(runs: Sequence[Run]) -> str:
    """A row for each run; of its losses the means of equal stretches."""
    wide = max(12, *(len(run.name) for run in runs))
    curve = "loss, from first to last".ljust(7 * POINTS - 1)
    lines = [f"{'':{wide}}  parameters  ms a step  peak MiB  {curve}  held out"]
    for run in runs:
        ends = [len(run.losses) * n // POINTS for n in range(POINTS + 1)]
        means = [statistics.mean(run.losses[a:b]) for a, b in itertools.pairwise(ends) if a < b]
        losses = " ".join(f"{mean:6.3f}" for mean in means).ljust(7 * POINTS - 1)
        row = f"{run.parameters:12,} {run.ms:10.1f} {run.mib:9.1f}  {losses} {run.held_out:9.3f}"
        lines.append(f"{run.name:{wide}}{row}")
    return "\n".join(lines)


def picture(runs: Sequence[Run], file: Path, title: str) -> bool:
    """Saves the losses against steps and against time; without matplotlib it says so, and the answer is False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return False
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(title)
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("step", "seconds"), strict=True):
        for run in runs:
            window = max(1, len(run.losses) // 25)
            smooth = [statistics.mean(run.losses[max(0, n - window + 1) : n + 1]) for n in range(len(run.losses))]
            axes.plot([n * (1 if what == "step" else run.ms / 1e3) for n in range(len(smooth))], smooth, label=run.name)
        axes.set_xlabel(what)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_ylabel("loss" if what == "step" else "")
    figure.savefig(file, dpi=100)
    print(f"picture: {file}")
    return True


def options(text: str, name: str, given: list[str] | None, **sizes: tuple[int, int]) -> argparse.Namespace:
    """An example's command line. A size has two values: the usual one, and one for --quick, which only shows that all
    works."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--png", type=Path, default=Path(f"{name}.png"), help=f"the picture ({name}.png)")
    parser.add_argument("--csv", type=Path, help="a file that gets a line for each model")
    for size, (usual, quick) in sizes.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help=f"{usual}, with --quick {quick}")
    found = parser.parse_args(given)
    for size, values in sizes.items():
        if getattr(found, size) is None:
            setattr(found, size, values[found.quick])
    found.device, found.name = torch.device(found.device), name
    return found


def finish(runs: list[Run], given: argparse.Namespace, title: str) -> list[Run]:
    """The table, the picture, and the lines of a file."""
    print(table(runs))
    picture(runs, given.png, title)
    if given.csv:
        rows = [{"example": given.name, "device": str(given.device), "steps": len(r.losses)} | asdict(r) for r in runs]
        with given.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, [key for key in rows[0] if key != "losses"], extrasaction="ignore")
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)
    return runs
