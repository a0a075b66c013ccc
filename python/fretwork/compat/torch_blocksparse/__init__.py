"""torch-blocksparse's names, signatures and modules: `import fretwork.compat.torch_blocksparse as torch_blocksparse`.

Layouts are 0/1 tensors (heads, rows, cols) and blocks square, as there. `install()` makes `import torch_blocksparse`
and its submodules find this package, so that code written for the original runs as it is:

>>> import fretwork.compat.torch_blocksparse
>>> fretwork.compat.torch_blocksparse.install()
>>> import torch, torch_blocksparse
>>> from torch_blocksparse.matmul import MatMul
>>> dot = torch_blocksparse.MatMul(torch.ones(1, 2, 2).long(), 16, "sdd")
>>> dot(torch.randn(1, 1, 32, 8), torch.randn(1, 1, 8, 32)).shape
torch.Size([1, 4, 16, 16])

Differences: every input may go without a gradient, any size and dtype that the maths allows works, on a CPU too, a row
with nothing left gives zeros, nothing that is unidirectional sees a later block, and `docs/coming-from.md` lists the
rest.
"""

import importlib
import sys

from fretwork.compat.torch_blocksparse.attention import MultiheadAttention, SparsityInfo, replace_mha
from fretwork.compat.torch_blocksparse.batchnorm import BatchNorm2d
from fretwork.compat.torch_blocksparse.conv import Conv2d
from fretwork.compat.torch_blocksparse.deepspeedsparseselfattention import DeepSpeedSparseSelfAttention, SparsityConfig
from fretwork.compat.torch_blocksparse.matmul import Linear, MatMul, SparseMatMul
from fretwork.compat.torch_blocksparse.permute import Permute, _permute
from fretwork.compat.torch_blocksparse.relu import ReLU
from fretwork.compat.torch_blocksparse.softmax import Softmax, SparseSoftmax

__all__ = [
    "BatchNorm2d",
    "Conv2d",
    "DeepSpeedSparseSelfAttention",
    "Linear",
    "MatMul",
    "MultiheadAttention",
    "Permute",
    "ReLU",
    "Softmax",
    "SparseMatMul",
    "SparseSoftmax",
    "SparsityConfig",
    "SparsityInfo",
    "_permute",
    "install",
    "replace_mha",
]

_SUBMODULES = ["attention", "batchnorm", "conv", "deepspeedsparseselfattention", "matmul", "permute", "relu", "softmax"]


def install(name: str = "torch_blocksparse") -> None:
    """Makes `import torch_blocksparse`, and that of its submodules, find this package in this process.

    Call it before the code that imports the name. If another package of that name is already imported, ImportError.
    """
    here = sys.modules[__name__]
    if sys.modules.get(name, here) is not here:
        got = getattr(sys.modules[name], "__file__", None)
        raise ImportError(f"install: {name}: expected not to be imported yet, got {got}")
    sys.modules[name] = here
    for submodule in _SUBMODULES:
        sys.modules[f"{name}.{submodule}"] = importlib.import_module(f"{__name__}.{submodule}")
