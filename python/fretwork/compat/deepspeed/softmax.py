"""Softmax over the stored blocks of a row: torch-blocksparse's, which DeepSpeed took over."""

from fretwork.compat.torch_blocksparse.softmax import Softmax

__all__ = ["Softmax"]
