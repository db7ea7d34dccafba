"""The package as others get it: a bare checkout, an sdist, a wheel, and the wheel installed."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import skip_without

ROOT = Path(__file__).parents[2]
#: Folders at the root that links in `tfdist/` lead to.
LINKED = ("launch", "models", "strategies")

#: Calls a hook of the build backend that `pyproject.toml` names, as a front end without isolation does.
_HOOK = """
import setuptools.build_meta, sys
print(getattr(setuptools.build_meta, sys.argv[1])(sys.argv[2]))
"""

#: What the package takes where its user has it, and says so where not.
_OF_THE_USERS = {
    *("horovod", "keras_hub", "opentelemetry", "ray", "mlflow", "trackio", "wandb"),
    # Of a program for another environment.
    *("peft", "torch", "transformers"),
}

pytestmark = pytest.mark.timeout(300)


def run(*command: str, cwd: Path, timeout: float = 240, **variables: str):
    """Runs a program that finds no tfdist but where it is told."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command,
        cwd=cwd,
        env=env | quiet | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def succeed(*command: str, cwd: Path, **options) -> str:
    done = run(*command, cwd=cwd, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """The files that git knows or would take, links as links, and nothing that a build has left."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if listed.returncode:
        pytest.skip("The tree is no checkout of git.")
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def built(hook: str, source: Path, out: Path) -> Path:
    """What a hook of the build backend makes of the sources in a folder."""
    said = succeed(sys.executable, "-c", _HOOK, hook, str(out), cwd=source)
    return out / said.splitlines()[-1]


@pytest.fixture(scope="session")
def sdist(checkout, tmp_path_factory) -> Path:
    """An sdist of a copy of the checkout: a build leaves files beside its sources."""
    source = tmp_path_factory.mktemp("sdist") / "source"
    shutil.copytree(checkout, source, symlinks=True)
    return built("build_sdist", source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    """A wheel of what the sdist holds."""
    source = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    return built("build_wheel", unpacked, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that pip has installed the wheel into, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    succeed(*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def entries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def package_files(folder: Path, *endings: str) -> set[str]:
    """The files of tfdist with one of these endings, as a wheel names them: through the links."""
    found = set()
    for place, _, names in os.walk(folder / "tfdist", followlinks=True):
        below = Path(place).relative_to(folder)
        found |= {(below / name).as_posix() for name in names if name.endswith(endings)}
    return found


def test_the_package_asks_for_what_it_imports():
    """Else something works only where another package has brought it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = dict(config["options.extras_require"])
    del extras["dev"]
    lines = "\n".join([config["options"]["install_requires"], *extras.values()]).splitlines()
    asked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    # Keras and TensorFlow bring h5py, rich and the like.
    for base in ("keras", "tensorflow"):
        asked += map(Requirement, importlib.metadata.requires(base) or ())
    names = {canonicalize_name(each.name) for each in asked if "extra" not in str(each.marker)}
    brought_by = importlib.metadata.packages_distributions()
    missing = {}
    for folder in ("tfdist", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            for module in _imported(path) - sys.stdlib_module_names - _OF_THE_USERS - {"tfdist"}:
                if names.isdisjoint(map(canonicalize_name, brought_by.get(module, [module]))):
                    missing[module] = path.relative_to(ROOT)
    assert not missing


def _imported(path: Path) -> set[str]:
    """The first names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_a_bare_checkout_is_imported(checkout):
    code = "import tfdist.strategies, tfdist.launch, tfdist.models; print(tfdist.__file__)"
    said = succeed(sys.executable, "-c", code, cwd=checkout)
    assert Path(said.splitlines()[-1]).is_relative_to(checkout)


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_at_the_root_says_how_it_is_imported(checkout, name):
    assert (checkout / "tfdist" / name).is_symlink()
    done = run(sys.executable, "-c", f"import {name}", cwd=checkout, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and f"`tfdist.{name}`" in last


def test_the_sdist_builds_without_the_checkout(sdist):
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tfdist/backend/native/peer.cc",
    ):
        assert name in names, name
    assert not [name for name in names if name.startswith("benchmarks/")]


def test_the_wheel_has_each_file_once_and_under_tfdist(wheel):
    names = entries(wheel)
    assert len(names) == len(set(names))
    tops = {name.partition("/")[0] for name in names}
    (metadata,) = tops - {"tfdist"}
    assert re.fullmatch(r"tfdist-.*\.dist-info", metadata)
    # As `tfdist/launch/run/main.py` and not as `launch/run/main.py` beside it.
    assert not [name for name in names if name.startswith(tuple(f"{room}/" for room in LINKED))]


def test_the_wheel_has_the_checkouts_modules_and_sources(checkout, wheel):
    names = set(entries(wheel))
    wanted = package_files(checkout, ".py", ".cc", ".h", "py.typed")
    found = {name for name in names if name.startswith("tfdist/")}
    assert found == wanted
    assert {name for name in found if name.endswith(".cc")}


def test_the_wheel_names_its_programs(checkout, wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        listed = archive.read(name).decode()
    programs = re.findall(r"^(tfdist-[\w-]+) = ", listed, re.MULTILINE)
    meant = re.findall(
        r"^    (tfdist-[\w-]+) = ", (checkout / "setup.cfg").read_text(), re.MULTILINE
    )
    assert programs and sorted(programs) == sorted(meant)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tests_pass_on_the_wheel_alone(checkout, installed, tmp_path):
    """Without a checkout beside them, tests run on ranks that import what pip has installed."""
    skip_without("horovod")
    for name in ("tests", "docs"):  # test_api compares with `docs/api.txt`.
        shutil.copytree(checkout / name, tmp_path / name, symlinks=True)
    shutil.copy(checkout / "README.md", tmp_path)
    shutil.copy(checkout / "pyproject.toml", tmp_path)  # Holds the markers.
    path = {"PYTHONPATH": str(installed)}
    code = """
import tfdist
from tfdist.testing import run_ranks

def where():
    import tfdist
    return tfdist.__file__

if __name__ == "__main__":
    print(*{tfdist.__file__, *run_ranks(where, engine="tensorflow")}, sep="\\n")
"""
    (tmp_path / "where.py").write_text(code)
    for file in succeed(sys.executable, "where.py", cwd=tmp_path, **path).splitlines():
        assert Path(file).is_relative_to(installed)
    (tmp_path / "where.py").unlink()
    subset = ["tests/test_mesh.py", "tests/test_api.py", "tests/collectives/test_conformance.py"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = ["-m", "not slow", "-k", "not conformance or horovod-2"]
    said = succeed(*pytest_, *chosen, *subset, cwd=tmp_path, timeout=500, **path)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
