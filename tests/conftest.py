"""Shared pieces of the Python tests: the device, fresh seeds, dense float64 references and the comparison."""

import os

import pytest
import torch

import fretwork as fw

# Error allowed against the float64 reference, in units of its largest magnitude.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="cpu or cuda")


def pytest_configure(config):
    # The tensors are small and several processes run; test_torch_integration asks for more threads where it counts.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device(name)


@pytest.fixture(autouse=True)
def subnormals():
    """What torch.compile builds flushes them to zero in the thread that loads it, and torch's own fp8 needs them."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def fresh_seed():
    """A new seed every run, printed on failure; FRETWORK_SEED repeats one."""
    seed = int(os.environ.get("FRETWORK_SEED", int.from_bytes(os.urandom(4), "little")))
    torch.manual_seed(seed)
    print(f"FRETWORK_SEED={seed}")


def dtypes_of(device):
    """float64 exists on CPU only."""
    common = [torch.float32, torch.float16, torch.bfloat16]
    return [torch.float64, *common] if device.type == "cpu" else common


def some_layout(heads=2, rows=3, cols=4, block=16, density=0.6):
    """Random, with one empty row and one empty column in the last head."""
    mask = torch.rand(heads, rows, cols) < density
    if heads:
        mask[-1, 0, :], mask[-1, :, -1] = False, False
    return fw.BlockLayout(mask, block)


def dense_of(values, layout):
    """Packed ((Z,) nnz, r, c) to dense (Z, H, M, N), from the mask alone."""
    values = values if values.dim() == 4 else values[None]
    out = values.new_zeros(values.shape[0], *layout.shape)
    stored = layout.mask(values.device)
    # Blocks stand in (head, row, column) order; so do those of a block view of the mask.
    r, c = layout.block_shape
    heads, rows, cols = layout.heads, *layout.blocks
    h, i, j = stored.reshape(heads, rows, r, cols, c)[:, :, 0, :, 0].nonzero(as_tuple=True)
    blocks = out.reshape(-1, heads, rows, r, cols, c).transpose(3, 4).clone()
    blocks[:, h, i, j] = values
    return blocks.transpose(3, 4).reshape(-1, *layout.shape)


def packed_of(dense, layout):
    """Dense (Z, H, M, N) to packed (Z, nnz, r, c), from the mask alone."""
    r, c = layout.block_shape
    heads, rows, cols = layout.heads, *layout.blocks
    h, i, j = layout.mask(dense.device).reshape(heads, rows, r, cols, c)[:, :, 0, :, 0].nonzero(as_tuple=True)
    return dense.reshape(-1, heads, rows, r, cols, c).transpose(3, 4)[:, h, i, j]


def assert_close(got, want, dtype, what="value", floor=1e-3):
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == dtype, f"{what}: dtype {got.dtype}, expected {dtype}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if want.numel():
        error = (got - want).abs().max().item() / max(want.abs().max().item(), floor)
        assert error <= TOLERANCE[dtype], f"{what}: error {error:.2e}"  # false for NaN too
