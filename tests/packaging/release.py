"""`make release`: builds an sdist and a wheel, looks at both, trains with what the wheel installs, and times it.

Each step ends the program when it fails; nothing is uploaded. Reads the checkout, and writes to `dist/`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.packaging import newcomer

__all__ = ["check_version", "main"]

ROOT = Path(__file__).parents[2]
#: Wheels of Horovod that `tfdist-install-horovod` has built and kept.
HOROVOD = Path("~/.cache/tfdist/wheels").expanduser()
#: What two ranks of each engine train, and what one process trains.
SCRIPT = """
import keras
import numpy as np

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).random((50, 4), dtype="float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
losses = model.fit(x, x.sum(axis=1), batch_size=16, epochs=3, verbose=0).history["loss"]
if strategy.is_chief:
    print(f"{type(strategy).__name__} of tfdist {tfdist.__version__} on {strategy.mesh.size}: {losses[-1]:.5f}")
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs all steps.

    Raises:
        SystemExit: A step failed; its output is above.
    """
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the packages")
    out = parser.parse_args(arguments).out.absolute()
    start = time.monotonic()
    version = check_version()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tfdist-release-") as name:
        folder = Path(name)
        _copy_checkout(folder / "source")
        _tool("build", "--no-isolation", f"--outdir={out}", str(folder / "source"))
        sdist, wheel = out / f"tfdist-{version}.tar.gz", out / f"tfdist-{version}-py3-none-any.whl"
        if sorted(out.iterdir()) != [wheel, sdist]:
            raise SystemExit(
                f"{out} holds {sorted(out.iterdir())}, not {wheel.name} and {sdist.name}."
            )
        _tool("twine", "check", "--strict", str(sdist), str(wheel))
        _tool("check_wheel_contents", str(wheel))
        _train(wheel, folder / "bare")
        # What pip needs is in its cache now.
        newcomer.main([str(wheel)])
    print(f"Ready in {time.monotonic() - start:.0f} s: {sdist}, {wheel}")


def check_version() -> str:
    """The version, which the package, the changelog and the citation name alike.

    Raises:
        SystemExit: One of them names another.
    """
    found = {
        "tfdist/_version.py": r'^__version__ = "(.+)"',
        "CHANGELOG.md": r"^## \[(\d.*?)\]",
        "CITATION.cff": r"^version: (.+)$",
    }
    named = {}
    for place, pattern in found.items():
        first = re.search(pattern, (ROOT / place).read_text(), re.MULTILINE)
        named[place] = first[1] if first else "no version"
    if len(set(named.values())) != 1:
        raise SystemExit(f"The files name different versions: {named}.")
    return named["CITATION.cff"]


def _copy_checkout(folder: Path) -> None:
    """The files that git has, links as links: a build leaves others beside its sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not os.path.lexists(ROOT / name):
            raise SystemExit(f"{name} is in git, and not in the checkout: commit that it is gone.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def _tool(module: str, *arguments: str) -> None:
    _run(sys.executable, "-m", module, *arguments, cwd=ROOT)


def _train(wheel: Path, folder: Path) -> None:
    """Installs the wheel into an environment of its own, and trains there on each engine that it has."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (folder / "train.py").write_text(SCRIPT)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    _run(*pip, str(wheel), cwd=folder)
    said = [_run(str(python), "train.py", cwd=folder)]
    engines = ["tensorflow"]
    if any(HOROVOD.glob("horovod-*/*.whl")):
        _run(*pip, f"{wheel}[horovod-build]", cwd=folder)
        _run(str(folder / "bin" / "tfdist-install-horovod"), cwd=folder)
        engines.append("horovod")
    else:
        print(f"Horovod is left out: no wheel of it is kept in {HOROVOD}.")
    for engine in engines:
        launcher = (str(folder / "bin" / "tfdist-run"), "-np", "2", f"--engine={engine}", "--")
        said.append(_run(*launcher, str(python), "train.py", cwd=folder))
    lines = [re.search(r"(\w+Strategy of .*): (\S+)$", text, re.MULTILINE) for text in said]
    losses = {found[1]: float(found[2]) for found in lines if found}
    if len(losses) != len(engines) + 1 or max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"One process and two ranks of each engine trained differently: {said}.")
    for name, loss in losses.items():
        print(f"{name}: loss {loss}")


def _run(*command: str, cwd: Path) -> str:
    """Runs a program that finds no tfdist but an installed one, shows what it says, and returns it."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    print("$", *(os.path.relpath(word, cwd) if word.startswith("/") else word for word in command))
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment | quiet,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=540,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{command[0]} ended with code {done.returncode}.")
    return done.stdout


if __name__ == "__main__":
    main()
