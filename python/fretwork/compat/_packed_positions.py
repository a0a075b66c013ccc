"""Where packed documents begin, of the position ids that a call of a Hugging Face model was given.

Models make position ids of their own where they get none, and attention sees no difference. So each call is looked at
before it runs: ids that were given without an attention mask are read there, once, and carry what was found.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_call = threading.local()  # `made`: whether the model that runs makes its position ids itself


def _begins(position_ids: Tensor) -> Tensor:
    """Which places of a batch of rows, one row after another, are a document's first."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 2, dim=-1) != 1).flatten()


def read_starts(position_ids: Tensor) -> Tensor | None:
    """Where documents begin, and at last their end; None for one in each row. Read on the host."""
    first = _begins(position_ids).nonzero()[:, 0]
    if len(first) == position_ids.shape[0]:
        return None
    return torch.cat([first, first.new_tensor([position_ids.numel()])]).int()


def _unread_starts(position_ids: Tensor) -> Tensor:
    """The same with room for a document in each place: those behind the last one are empty."""
    total = position_ids.numel()
    first = torch.nonzero_static(_begins(position_ids), size=total + 1)[:, 0]
    return torch.where(first < 0, total, first).int()


def _unreadable(x: Tensor) -> bool:
    """Whether the host must not look: a compiler traces the call, or a CUDA graph captures it."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def starts_of(position_ids: Any, batch: int, rows: int) -> Tensor | None:
    """Where documents begin in the rows of a batch, of what attention gets; None for one in each row."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != rows:
        return None
    if hasattr(position_ids, "_fretwork_starts"):
        starts: Tensor | None = position_ids._fretwork_starts
    elif _unreadable(position_ids):
        return None
    elif getattr(_call, "made", False):
        starts = position_ids._fretwork_starts = None  # type: ignore[attr-defined]  # known when layers run again
    else:  # copies of given ids, or a layer outside of a model
        starts = read_starts(position_ids)
    if starts is None or position_ids.shape[0] == batch:
        return starts
    each = torch.arange(batch, device=starts.device, dtype=starts.dtype)[:, None] * rows + starts[:-1]
    return torch.cat([each.flatten(), starts[-1:] * batch])


def _marked(position_ids: Any, alone: bool) -> Any:
    """The same ids with what is known of them; `alone`: nothing else says where documents are, or what is padding."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or hasattr(position_ids, "_fretwork_starts"):
        return position_ids
    starts = None
    if alone and position_ids.shape[1] > 1:
        starts = _unread_starts(position_ids) if _unreadable(position_ids) else read_starts(position_ids)
    position_ids = position_ids.view_as(position_ids)  # not the caller's, which may be given again with a mask
    position_ids._fretwork_starts = starts
    return position_ids


def _look(places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], bool]:
    """The positional arguments and `kwargs`, changed in place, with marked ids, and whether there are none.

    `places`: where arguments are if they are given by position.
    """

    def given(name: str) -> Any:
        return args[places[name]] if places.get(name, len(args)) < len(args) else kwargs.get(name)

    position_ids = given("position_ids")
    if position_ids is None:
        return args, True
    marked = _marked(position_ids, given("attention_mask") is None and kwargs.get("cu_seq_lens_q") is None)
    if "position_ids" in kwargs:
        kwargs["position_ids"] = marked
        return args, False
    at = places["position_ids"]
    return (*args[:at], marked, *args[at + 1 :]), False


def look_at_positions(model: type[Any]) -> None:
    """Lets each call of models of a class be looked at, where it has our attention."""
    forward: Callable[..., Any] = model.forward
    if getattr(forward, "_fretwork_looks", False):
        return
    names = list(inspect.signature(forward).parameters)
    places: dict[str, int] = {
        name: names.index(name) - 1 for name in ("position_ids", "attention_mask") if name in names
    }

    @functools.wraps(forward)
    def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation != "fretwork":
            return forward(self, *args, **kwargs)
        args, made = _look(places, args, kwargs)
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        before, _call.made = getattr(_call, "made", False), made
        try:
            return forward(self, *args, **kwargs)
        finally:
            _call.made = before

    looked_at._fretwork_looks = True  # type: ignore[attr-defined]
    model.forward = looked_at
