"""torch's rules for the selection of key blocks."""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.differentiable import holds_dtensors, on_parts
from fretwork._torch.registration import operand, ops
from fretwork._torch.vmap import mapped

select_blocks_op = ops.select_blocks.default

# The same op for graphs, in which the number of blocks may be a symbol: other numbers then need no other graph.
_library = torch.library.Library("fretwork", "FRAGMENT")  # registrations last as long as this object
_library.define(
    "select_any_blocks" + str(select_blocks_op._schema).partition("select_blocks")[2].replace("int", "SymInt")
)
_library.impl("select_any_blocks", select_blocks_op, "CompositeExplicitAutograd")
_select_any_blocks = ops.select_any_blocks.default


def selected_blocks(*arguments: Any) -> Any:
    """Counts and indices. A graph that may be saved has the op that the library itself registers."""
    if holds_dtensors(arguments):
        return on_parts("select_blocks", select_blocks_op, arguments)
    graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return (_select_any_blocks if graph else select_blocks_op)(*arguments)


@torch.library.register_fake("fretwork::select_any_blocks")
@torch.library.register_fake("fretwork::select_blocks")
def _fake(
    q: Tensor, k: Tensor, top_k: int, block_q: int, block_k: int, causal: bool, first: int, last: int
) -> tuple[Tensor, Tensor]:
    shape = _shapes.check_select_blocks(operand("q", q), operand("k", k), top_k, (block_q, block_k), first, last)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty((*shape, top_k), dtype=torch.int32)


def _vmap(info: Any, in_dims: tuple[Any, ...], q: Tensor, k: Tensor, *rest: Any) -> tuple[Any, Any]:
    size = info.batch_size
    q, k = (mapped(t, d, size) for t, d in zip((q, k), in_dims, strict=False))
    found = select_blocks_op(q, k, *rest)
    batch = q.shape[0] // size if size else 0
    return tuple(t.unflatten(0, (size, batch)) for t in found), (0, 0)


for _name in ("select_blocks", "select_any_blocks"):
    torch.library.register_vmap(f"fretwork::{_name}", _vmap)
