"""Checks of plain arguments that every module shares: numbers, flags, masks, and how an error reads."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np


def fail(op: str, argument: str, expected: object, got: object, kind: type[Exception] = RuntimeError) -> NoReturn:
    """An op's error, in the form that all of them have."""
    raise kind(f"{op}: {argument}: expected {expected}, got {got}")


def refuse(op: str, argument: str, expected: object, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    """`fail` with the error of constructors and pattern functions."""
    fail(op, argument, expected, got, kind)


def expect(right: bool, op: str, argument: str, expected: object, got: object) -> None:
    """Fails unless `right`."""
    if not right:
        fail(op, argument, expected, got)


@contextlib.contextmanager
def needs(op: str, package: str, extra: str) -> Iterator[None]:
    """Names the extra that brings a package, if an import inside does not find it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name != package:
            raise
        text = f"{op}: {package}: expected the package, got none; pip install 'fretwork[{extra}]'"
        raise ModuleNotFoundError(text, name=package) from None


def whole_number(op: str, argument: str, value: Any) -> int:
    """A Python int of 64 bits from anything that counts as an integer."""
    is_bool = isinstance(value, (bool, np.bool_)) or (
        not isinstance(value, int) and str(getattr(value, "dtype", "")) == "torch.bool"
    )
    if is_bool or not hasattr(type(value), "__index__"):
        raise TypeError(f"{op}: {argument}: expected an int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # such as a tensor that is no integer
        raise TypeError(f"{op}: {argument}: expected an int, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {argument}: expected a number of 64 bits, got {number}")
    return number


def number(op: str, argument: str, value: Any) -> float:
    """A Python float, not from traced values. Texts and bools are refused, although `float` takes them."""
    if isinstance(value, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{op}: {argument}: expected a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{op}: {argument}: expected a number, got {type(value).__name__}") from None
    except OverflowError:
        raise RuntimeError(f"{op}: {argument}: expected a number of 64 bits, got a larger one") from None


def flag(op: str, argument: str, value: Any) -> bool:
    """A bool from one of Python or NumPy, or from 0 or 1; any other value, such as a size or a text, is refused."""
    if value is True or value is False:
        return value
    if not isinstance(value, (int, np.bool_, np.integer)) or value not in (0, 1):
        got = repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
        raise TypeError(f"{op}: {argument}: expected True or False, got {got}")
    return bool(value)


def zeros_and_ones(op: str, argument: str, value: Any) -> np.ndarray:
    """A contiguous uint8 copy of anything that holds 0 and 1 only: a torch tensor on any device, an array, lists."""
    if hasattr(value, "detach"):  # NumPy cannot read a tensor that lives on a GPU, or bfloat16
        if value.is_meta or str(value.layout) != "torch.strided":
            kind = "no data" if value.is_meta else f"the layout {value.layout}"
            raise TypeError(f"{op}: {argument}: expected a dense tensor with data, got one with {kind}")
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{op}: {argument}: expected rows of equal lengths, got ragged lists") from None
    if array.dtype.kind not in "biuf":
        got = type(value).__name__ if array.dtype.kind == "O" else array.dtype
        raise TypeError(f"{op}: {argument}: expected a bool or integer dtype, got {got}")
    if array.dtype.kind != "b" and (wrong := array[(array != 0) & (array != 1)]).size:
        raise ValueError(f"{op}: {argument}: expected 0 or 1 everywhere, got {wrong.flat[0]}")
    return np.array(array, dtype=np.uint8, order="C")
