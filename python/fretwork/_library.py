"""Where Fretwork's shared libraries are, and the C interface of the core."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np


def library_path(name: str) -> Path:
    """The file of a library, such as "fretwork_torch", in $FRETWORK_LIB_DIR if that is set, else in the package.

    A package that was installed with `pip install -e` has two folders: the source tree's, and the one with what was
    built.
    """
    given = os.environ.get("FRETWORK_LIB_DIR")
    folders = [Path(given)] if given else [Path(folder) / "lib" for folder in sys.modules["fretwork"].__path__]
    for folder in folders:
        if (file := folder / f"lib{name}.so").exists():
            return file
    how = "install the package, or build it (make build) and set FRETWORK_LIB_DIR to the build's lib folder"
    if name == "fretwork_jax" and any((folder / "libfretwork.so").exists() for folder in folders):
        how = "it was built where jaxlib was not: with jax installed, install the package again (pip --force-reinstall)"
    raise ImportError(
        f"fretwork: libraries: expected lib{name}.so in {' or '.join(map(str, folders))}, got no such file; {how}"
    )


def program_path() -> Path:
    """The program `fretwork`: beside the libraries' folder in bin."""
    given = os.environ.get("FRETWORK_LIB_DIR")
    folders = [Path(given).parent] if given else [Path(folder) for folder in sys.modules["fretwork"].__path__]
    for folder in folders:
        if (file := folder / "bin" / "fretwork").exists():
            return file
    raise ImportError(
        f"fretwork: program: expected fretwork in {' or '.join(str(folder / 'bin') for folder in folders)}, "
        "got no such file; install the package, or build it (make build) and set FRETWORK_LIB_DIR"
    )


class _Handle(ctypes.Structure):
    """A pattern of the core."""


Handle = ctypes._Pointer

_POINTER = ctypes.POINTER(_Handle)
_INT64S = ctypes.POINTER(ctypes.c_int64)
_UINTS, _SIZES = ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_size_t)
_POINTERS, _DOUBLE = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_double)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "error": (ctypes.c_char_p, []),
    "pattern_parse": (_POINTER, [ctypes.c_char_p, ctypes.c_size_t]),
    "block_layout": (_POINTER, [_INT64S, ctypes.c_void_p]),
    "pattern_transpose": (_POINTER, [_POINTER]),
    "pattern_free": (None, [_POINTER]),
    "pattern_hold": (ctypes.c_int, [_POINTER]),
    "key_let_go": (None, [ctypes.c_char_p]),
    "pattern_text": (ctypes.c_char_p, [_POINTER]),
    "pattern_key": (ctypes.c_char_p, [_POINTER]),
    "pattern_rank": (ctypes.c_int, [_POINTER]),
    "pattern_shape": (_INT64S, [_POINTER]),
    "pattern_nnz": (ctypes.c_int64, [_POINTER]),
    "pattern_density": (ctypes.c_double, [_POINTER]),
    "pattern_mask": (ctypes.c_int, [_POINTER, ctypes.c_void_p, ctypes.c_int64]),
    "pattern_from_mask": (_POINTER, [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]),
    "pattern_from_acsr": (_POINTER, [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2),
    "pattern_union": (_POINTER, [_POINTER, _POINTER]),
    "pattern_intersection": (_POINTER, [_POINTER, _POINTER]),
    "pattern_slice": (_POINTER, [_POINTER, _INT64S]),
    "pattern_place": (_POINTER, [_POINTER] + [ctypes.c_int64] * 4),
    "pattern_diag": (_POINTER, [ctypes.POINTER(_POINTER), ctypes.c_size_t]),
    "pattern_with_prefix": (_POINTER, [_POINTER, ctypes.c_int64]),
    "pattern_from_runs": (_POINTER, [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t]),
    "pattern_contains": (ctypes.c_int, [_POINTER, ctypes.c_int64, ctypes.c_int64]),
    "pattern_block_cover": (_POINTER, [_POINTER, ctypes.c_int64, ctypes.c_int64, _DOUBLE]),
    "pattern_shard": (ctypes.c_int, [_POINTER, ctypes.c_int64, ctypes.c_int64, _INT64S, _INT64S]),
    "pattern_rows_nnz": (ctypes.c_int64, [_POINTER, ctypes.c_int64, ctypes.c_int64]),
    "pattern_rows_keys": (
        ctypes.c_int64,
        [_POINTER, ctypes.c_int64, ctypes.c_int64, _INT64S, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64],
    ),
    "pattern_acsr": (ctypes.c_int, [_POINTER] + [ctypes.c_void_p] * 3),
    "pattern_describe": (ctypes.c_int64, [_POINTER, ctypes.c_char_p, ctypes.c_size_t]),
    "pattern_draw": (
        ctypes.c_int64,
        [_POINTER, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "pattern_svg": (ctypes.c_int64, [_POINTER, ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t]),
    "block_layout_sizes": (ctypes.c_int, [_POINTER, _INT64S]),
    "kronecker_pattern": (_POINTER, [_INT64S]),
    "kronecker_sizes": (ctypes.c_int, [_POINTER, _INT64S]),
    "kronecker_block_layout": (_POINTER, [_POINTER]),
    "kronecker_chainable": (ctypes.c_int, [_INT64S, _INT64S]),
    "kronecker_product": (ctypes.c_int, [_INT64S, _INT64S, _INT64S]),
    "kronecker_monarch": (ctypes.c_int, [ctypes.c_int64] * 4 + [_INT64S]),
    "kronecker_butterfly": (ctypes.c_int, [ctypes.c_int64, _INT64S]),
    "kronecker_plan": (
        ctypes.c_int,
        [_INT64S, ctypes.c_int, *[ctypes.c_char_p] * 2, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t],
    ),
    "kronecker_dense_wins": (
        ctypes.c_int,
        [_INT64S, ctypes.c_int, *[ctypes.c_char_p] * 2, ctypes.c_int, ctypes.c_int64],
    ),
    "kernel_compile": (ctypes.c_int, [ctypes.c_char_p] * 3 + [_INT64S]),
    "kernel_load": (ctypes.c_void_p, [ctypes.c_char_p] * 2 + [ctypes.c_int]),
    "kernel_launch": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_int, _UINTS, _UINTS, ctypes.c_int, _POINTERS, _SIZES, ctypes.c_int, ctypes.c_void_p],
    ),
    "two_four_order": (
        ctypes.c_int64,
        [ctypes.c_char_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_char_p, ctypes.c_int64, _INT64S, ctypes.c_int64],
    ),
    "two_four_dense_wins": (
        ctypes.c_int,
        [ctypes.c_int64] * 3 + [ctypes.c_char_p] * 2 + [ctypes.c_int, ctypes.c_char_p],
    ),
    "pattern_width": (ctypes.c_int64, [_POINTER, ctypes.c_char_p]),
    "pattern_columns": (ctypes.c_int, [_POINTER, ctypes.c_int64, ctypes.c_void_p]),
    "kronecker_project": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, _INT64S, ctypes.c_int, _POINTERS, _DOUBLE, ctypes.c_int],
    ),
}


@functools.cache
def core() -> ctypes.CDLL:
    """The core library, with the types of its C functions set."""
    library = ctypes.CDLL(str(library_path("fretwork")))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"fretwork_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def int64s(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers as a C array."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def last_error() -> str:
    """The text of the C call that just failed on this thread."""
    return core().fretwork_error().decode()


@contextmanager
def owned(handle: "Handle[_Handle]") -> "Iterator[Handle[_Handle]]":
    """A pattern's handle for the length of a scope; ValueError with the core's text when it is null."""
    if not handle:
        raise ValueError(last_error())
    try:
        yield handle
    finally:
        core().fretwork_pattern_free(handle)


def two_four_order(op: str, layout: object, lines: int, k: int, dtype: str, tile_k: int) -> np.ndarray:
    """A foreign order of 2:4 metadata by its name: for each of its bytes the plain one that it holds, or −1."""
    arguments = (op.encode(), str(layout).encode(), lines, k, dtype.encode(), tile_k)
    room = lines * k  # more than any order has but for the smallest
    while True:
        order = np.empty(room, np.int64)
        count = int(core().fretwork_two_four_order(*arguments, order.ctypes.data_as(_INT64S), room))
        if count < 0:
            raise ValueError(last_error())
        if count <= room:
            return order[:count]
        room = count
