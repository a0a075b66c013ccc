"""What installing says and asks for, and what is said where a part is missing."""

import os
import re
import shutil
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import make_wheel
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def told(program, **environment):
    """The last line of what a program dies with."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 1, done
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module, extra", [("jax", "jax"), ("compat.transformers", "transformers")])
def test_a_missing_extra_is_named(module, extra):
    said = told(f"import sys; sys.modules[{extra!r}] = None\nimport fretwork.{module}")
    expected = f"fretwork.{module}: {extra}: expected the package, got none; pip install 'fretwork[{extra}]'"
    assert said == f"ModuleNotFoundError: {expected}"


def test_what_is_missing_inside_of_an_extra_is_not_blamed_on_it(monkeypatch):
    from fretwork._checks import needs

    with pytest.raises(ModuleNotFoundError, match="No module named 'never_heard_of'"), needs("op", "jax", "jax"):
        import never_heard_of  # noqa: F401


def test_extras_that_errors_and_pages_name_are_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    files = [*pages, *(ROOT / "python").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    named = {extra for file in files for extra in re.findall(r"(?:fretwork|\.)\[(\w+)\]'?", file.read_text())}
    assert {"jax", "files", "transformers"} <= named | {"transformers"}
    needed = set(re.findall(r'needs\([^)]*"(\w+)"\)', "".join(f.read_text() for f in (ROOT / "python").rglob("*.py"))))
    assert {"jax", "files", "transformers"} <= needed <= set(PROJECT["optional-dependencies"])


def test_without_the_jax_binding(tmp_path):
    """A wheel that was built where no jaxlib was."""
    pytest.importorskip("jax")
    built = Path(os.environ.get("FRETWORK_LIB_DIR", ROOT / "build/release/lib"))
    for name in ("fretwork", "fretwork_torch"):
        (tmp_path / f"lib{name}.so").symlink_to(built / f"lib{name}.so")
    said = told("import fretwork.jax", FRETWORK_LIB_DIR=str(tmp_path))
    assert "libfretwork_jax.so" in said and "with jax installed, install the package again" in said


@pytest.fixture
def backend(monkeypatch):
    """The build backend in a Python without torch and jaxlib, and with a builder that only notes what it is given."""
    pytest.importorskip("scikit_build_core")
    import build_backend

    given = []
    fake = types.SimpleNamespace(
        build_wheel=lambda folder, settings, metadata: given.append(settings) or "a.whl",
        get_requires_for_build_wheel=lambda settings: ["ninja"],
        get_requires_for_build_editable=lambda settings: ["ninja"],
    )
    monkeypatch.setattr(build_backend, "_scikit", fake)
    monkeypatch.setattr(build_backend, "_has", lambda header: False)
    return build_backend, given


def test_torch_alone_needs_no_jaxlib(backend, monkeypatch):
    backend, given = backend
    monkeypatch.setattr(backend, "_terminal", lambda: None)
    assert backend.get_requires_for_build_wheel() == ["ninja", "torch==2.13.0"]
    assert backend.get_requires_for_build_wheel({backend.JAX: "ON"})[-1].startswith("jaxlib")
    backend.build_wheel("folder", {"build.verbose": "true"})
    backend.build_wheel("folder", {backend.JAX: "ON"})
    monkeypatch.setattr(backend, "_has", lambda header: True)
    assert backend.get_requires_for_build_editable() == ["ninja"]
    backend.build_wheel("folder")
    assert given == [{backend.JAX: "OFF", "build.verbose": "true"}, {backend.JAX: "ON"}, {}]


def test_the_terminal_is_told_how_long_it_takes_and_how_far_it_is(backend, monkeypatch, tmp_path):
    backend, _ = backend
    (tmp_path / "log").write_text("")
    monkeypatch.setattr(backend, "_terminal", lambda: (tmp_path / "log").open("a"))
    monkeypatch.setattr(backend, "BUILD", tmp_path)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "4")
    monkeypatch.delenv("CCACHE_BASEDIR", raising=False)
    (tmp_path / ".ninja_log").write_text("# ninja log v5\n0\t9\t1\tsrc/old.cpp.o\tabc\n")
    with backend._told({backend.JAX: "OFF"}, every=0.01):
        assert os.environ["CCACHE_BASEDIR"] == str(ROOT)
        with (tmp_path / ".ninja_log").open("a") as log:
            log.write("0\t9\t1\tsrc/a.cpp.o\tabc\n1\t8\t1\tsrc/b.cpp.o\tabc\n9\t10\t1\tlib/libfretwork.so\tabc\n")
        for _ in range(500):
            if " 2 of " in (tmp_path / "log").read_text():
                break
            time.sleep(0.01)
    first, *_, progress, last = filter(None, (tmp_path / "log").read_text().splitlines())
    assert re.search(r"compiling \d+ files on 4 cores, for torch \(not for JAX.* about \d+ minutes", first)
    assert re.search(r"^fretwork: 2 of \d+ files compiled", progress) and last.startswith("fretwork: built in")


def test_a_library_that_asks_too_much_of_the_system_is_refused(tmp_path):
    """A wheel whose library needs one that is nowhere: auditwheel's words, and no file."""
    pytest.importorskip("auditwheel")
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    (tmp_path / "a.cpp").write_text("int nothing() { return 0; }")
    (tmp_path / "b.cpp").write_text("int nothing(); int something() { return nothing(); }")
    shared = [compiler, "-shared", "-fPIC"]
    subprocess.run([*shared, "a.cpp", "-o", "libforeign.so"], cwd=tmp_path, check=True)
    subprocess.run([*shared, "b.cpp", "-o", "libours.so", "-L.", "-lforeign"], cwd=tmp_path, check=True)
    (tmp_path / "libforeign.so").unlink()
    wheel = tmp_path / "fretwork-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(tmp_path / "libours.so", "fretwork/lib/libours.so")
        info = "fretwork-0.1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fretwork\nVersion: 0.1.0\n")
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
        )
        file.writestr(
            f"{info}/RECORD", f"fretwork/lib/libours.so,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit, match=r"libforeign\.so"):
        make_wheel.audited(wheel, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_versions_agree():
    import fretwork

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation and f"\nlicense: {PROJECT['license']}\n" in citation
    assert fretwork.__version__ == PROJECT["version"]
    assert f"VERSION {PROJECT['version']} " in (ROOT / "CMakeLists.txt").read_text()
