"""What the tests of fretwork.jax share: the device, seeds, and the comparison of values and gradients with float64."""

import functools
import os

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other test processes use the same GPU
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(scope="module", autouse=True)
def on_device(request):
    """float64 for the references, and the device that was asked for."""
    name = request.config.getoption("--device", "cpu")
    try:
        device = jax.devices("cpu" if name == "cpu" else "cuda")[0]
    except RuntimeError:
        pytest.skip("this jax has no CUDA device")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield device
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def exact_products():
    """JAX's default lets a GPU round fp32 to tf32."""
    with jax.default_matmul_precision("highest"):
        yield


def to_jax(t):
    return jnp.asarray(t.detach().numpy())


@pytest.fixture(params=list(TOLERANCE))
def dtype(request, on_device):
    if request.param == "float64" and on_device.platform != "cpu":
        pytest.skip("float64 exists on CPU only")
    return request.param


@pytest.fixture
def rng():
    """A new seed every run, printed on failure; FRETWORK_SEED repeats one."""
    seed = int(os.environ.get("FRETWORK_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"FRETWORK_SEED={seed}")
    return np.random.default_rng(seed)


def rejects(op, error=RuntimeError):
    return pytest.raises(error, match=rf"^{op}: .+: expected .+, got .")


def assert_close(got, want, dtype, what):
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert np.array_equal(np.isnan(got), np.isnan(want)), f"{what}: NaN where none is expected, or the reverse"
    if want.size:
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-3)
        assert error <= TOLERANCE[dtype], f"{what}: error {error:.2e} over {TOLERANCE[dtype]:.0e}"


def check(function, reference, inputs, rng, dtype="float32"):
    """Value and gradients of `function`, jitted as one program."""
    exact = [jnp.nan_to_num(x.astype("float64"), nan=0.0, posinf=np.inf, neginf=-np.inf) for x in inputs]
    upstream = jnp.asarray(rng.standard_normal(jax.eval_shape(reference, *exact).shape), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(f, d, *x):
        out, pull = jax.vjp(f, *x)
        return out, pull(d)

    want, exact_gradients = with_gradients(reference, upstream.astype("float64"), *exact)
    got, gradients = with_gradients(function, upstream, *inputs)
    assert got.dtype == dtype
    assert_close(got, want, dtype, "value")
    for n, (gradient, exact_one) in enumerate(zip(gradients, exact_gradients, strict=True)):
        assert gradient.dtype == inputs[n].dtype
        assert_close(gradient, exact_one, dtype, f"gradient of input {n}")
