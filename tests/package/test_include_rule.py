"""The checker of what may include what refuses what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_includes import fault


@pytest.mark.parametrize(
    ("file", "target"),
    [
        ("src/core/error.cpp", "pattern/text.h"),
        ("src/core/error.cpp", "../ops/attention/plan.h"),
        ("src/runtime/plan_cache.cpp", "ops/attention/plan.h"),
        ("src/ops/kronecker/cuda/launch.cpp", "ops/attention/plan.h"),
        ("src/ops/kronecker/cuda/launch.cpp", "bindings/torch/views.h"),
        ("src/ops/kronecker/cuda/launch.cpp", "torch/all.h"),
        ("src/ops/kronecker/cuda/launch.cpp", "cuda_runtime.h"),
        ("src/ops/kronecker/cuda/launch.cpp", "nvrtc.h"),
        ("src/ops/kronecker/cuda/few.cuh", "cuda/ptx"),
        ("src/ops/kronecker/cuda/few.cuh", "ops/kronecker/choice.h"),
        ("src/ops/kronecker/cuda/few.cuh", "core/error.h"),
        ("include/fretwork/ops.h", "ops/attention/plan.h"),
    ],
)
def test_refused(file: str, target: str) -> None:
    assert fault(Path(file), target)


@pytest.mark.parametrize(
    ("file", "target"),
    [
        ("src/ops/kronecker/cuda/launch.cpp", "runtime/kernels.h"),
        ("src/ops/kronecker/cuda/few.cuh", "device/mma.cuh"),
        ("src/ops/kronecker/cuda/few.cuh", "ops/kronecker/cuda/params.h"),
        ("include/fretwork/ops.h", "fretwork/context.h"),
        ("include/fretwork/ops.h", "cstdint"),
        ("bindings/torch/library.cpp", "torch/csrc/stable/library.h"),
    ],
)
def test_allowed(file: str, target: str) -> None:
    assert fault(Path(file), target) is None
