"""`make matrix`: quick conformance and parity on Pythons and on pairs of TensorFlow and Keras.

Each cell has an environment of its own, which is kept; the table goes to `docs/stability.md`.

    python -m tests.versions.matrix --folder=.matrix --only=py3.12-tf2.20
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from tfdist.runtime.versions import TESTED

_FOLDER = flags.DEFINE_string(
    "folder", ".matrix", "Folder of the environments and of what came out"
)
_ONLY = flags.DEFINE_list("only", [], "Cells to run, by what their names begin with [all]")
_SECONDS = flags.DEFINE_float("seconds", 900.0, "Most seconds of a cell's tests")
_TABLE = flags.DEFINE_boolean(
    "table", False, "Writes the table of what ran before, and runs nothing"
)

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "stability.md"
PYTHONS = ("3.11", "3.12", "3.13")
#: A TensorFlow with a Keras of its time.
PAIRS = tuple(
    (".".join(map(str, tensorflow)), ".".join(map(str, keras))) for tensorflow, keras in TESTED
)
#: The next ones, as pre-releases and nightly builds: they are allowed to fail.
NEXT = (("2.22", "3.15"), ("2.21", "3.16"))
#: Beside TensorFlow and Keras: what tfdist asks for, and what tests do.
_PACKAGES = (
    *("absl-py", "cloudpickle", "packaging", "psutil", "pyyaml", "scipy", "tabulate"),
    *("tensorstore", "wrapt"),
    *("hypothesis", "pytest", "pytest-timeout"),
)
_TESTS = (
    "tests/backend/keras",
    "tests/collectives/test_conformance.py",
    "tests/parity/test_programs.py",
)
#: Each collective on two ranks of TensorFlow's engine in all dtypes, each kind of model on two ranks with
#: batches that do not divide, and the seam. Some of it is slow elsewhere, where other tests do the same.
_CHOSEN = (
    "test_calls or test_functional or test_stored or private_keras or (fewer_ranks and tensorflow-2)"
    " or (uneven_batches and tensorflow-2 and (convnet-adamw or two_in_two_out-sgd))"
)
_NO_WHEEL = "no wheel of TensorFlow"
_BEGIN, _END = "<!-- what `make matrix` found -->", "<!-- end -->"
#: Whether what tfdist relies on is there: the checks of signatures, and a model under a strategy.
_SEAM = """
import keras, tfdist.strategies as s
with s.LocalStrategy().scope():
    keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A Python with a pair of TensorFlow and Keras, by their minor versions."""

    python: str
    tensorflow: str
    keras: str

    @property
    def may_fail(self) -> bool:
        """Whether it is one of the next versions."""
        return (self.tensorflow, self.keras) in NEXT

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"py{self.python}-tf{self.tensorflow}-k{self.keras}"


@dataclasses.dataclass
class Result:
    """What came of a cell: whether it is green, in words, and when and in how many seconds.

    A cell that there is no TensorFlow for is neither green nor a failure.
    """

    green: bool
    words: str
    seconds: float = 0.0
    day: str = ""


def cells() -> Iterator[Cell]:
    """All of them."""
    for python in PYTHONS:
        for tensorflow, keras in PAIRS:
            yield Cell(python, tensorflow, keras)
    for tensorflow, keras in NEXT:
        yield Cell(PYTHONS[0], tensorflow, keras)


def interpreter(version: str) -> str | None:
    """A Python of a minor version: on the PATH, or among pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [
        str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    ]
    if sys.version.startswith(f"{version}."):
        candidates.insert(0, sys.executable)
    for path in filter(None, candidates):
        done = run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], 30)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def run(command: Sequence[str], seconds: float, **options) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; code 124 where it takes too long."""
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, check=False, **options
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return subprocess.CompletedProcess(command, 124, said, f"not done in {seconds:g} s")


def environment(cell: Cell, folder: Path) -> tuple[str | None, str]:
    """The Python of a cell's environment, which is made where it is not there; or why there is none."""
    home = folder / cell.name
    python = home / "bin" / "python"
    if (home / "ok").exists():
        return str(python), ""
    found = interpreter(cell.python)
    if found is None:
        return None, f"there is no Python {cell.python} here"
    is_nightly = cell.may_fail and cell.keras not in dict(PAIRS).values()
    keras = () if is_nightly else (f"keras=={cell.keras}.*",)
    wanted = [f"tensorflow=={cell.tensorflow}.*", *keras, *_PACKAGES]
    if (uv := shutil.which("uv")) is not None:
        made = run([uv, "venv", "--clear", "--python", found, str(home)], 120)
        pip, at, pre = [uv, "pip"], ["--python", str(python)], "--prerelease=allow"
    else:
        made = run([found, "-m", "venv", "--clear", str(home)], 120)
        pip, at, pre = [str(python), "-m", "pip"], [], "--pre"
    if made.returncode:
        return None, f"no environment: {_last(made)}"
    early = [pre] if cell.may_fail and not is_nightly else []
    installed = run([*pip, "install", *at, *early, *wanted], 1800)
    if is_nightly and not installed.returncode:
        # Both packages contain `keras`.
        run([*pip, "uninstall", *at, *([] if at else ["-y"]), "keras"], 120)
        installed = run([*pip, "install", *at, pre, f"keras-nightly=={cell.keras}.*"], 600)
    if installed.returncode:
        said = installed.stdout + installed.stderr
        if re.search(r"No matching distribution|no wheels? with a matching|unsatisfiable", said):
            return None, f"{_NO_WHEEL} {cell.tensorflow} for this Python"
        return None, f"not installed: {_last(installed)}"
    (home / "ok").touch()
    return str(python), ""


def examine(cell: Cell, folder: Path, seconds: float) -> Result:
    """Runs the quick tests in a cell's environment."""
    python, why = environment(cell, folder)
    if python is None:
        return Result(False, why)
    # Other versions than those of the range are what is asked about.
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "TFDIST_ANY_VERSION": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = {"cwd": ROOT, "env": variables}
    begin = time.monotonic()
    seam = run([python, "-c", _SEAM], 180, **options)
    if seam.returncode:
        return Result(False, _last(seam), time.monotonic() - begin)
    chosen = ["-q", "--cross=each", "-k", _CHOSEN, "-p", "no:cacheprovider", "--tb=line"]
    tests = run([python, "-m", "pytest", *chosen, *_TESTS], seconds, **options)
    (folder / f"{cell.name}.log").write_text(tests.stdout + tests.stderr)
    took = time.monotonic() - begin
    if tests.returncode == 124:
        return Result(False, tests.stderr, took)
    summary = re.search(r"^(?:\d+ \w+(?:, )?)+ in .*$", tests.stdout, re.MULTILINE)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", summary[0]) if summary else []
    words = ", ".join(counts) or _last(tests)
    return Result(tests.returncode == 0, words, took)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1][:200] if lines else f"exit code {done.returncode}"


def table(found: dict[str, Result]) -> str:
    """What came out, in Markdown: a row for each pair, a column for each Python."""
    rows = [
        f"| TensorFlow | Keras | {' | '.join(f'Python {python}' for python in PYTHONS)} |",
        f"|---|---|{'---|' * len(PYTHONS)}",
    ]
    for tensorflow, keras in (*PAIRS, *NEXT):
        shown = []
        for python in PYTHONS:
            cell = Cell(python, tensorflow, keras)
            result = found.get(cell.name)
            if result is None:
                shown.append("not run" if cell in cells() else "")
                continue
            words = result.words.replace("|", "/")
            shown.append(f"green: {words}" if result.green else words)
        names = [f"{tensorflow} rc", keras] if tensorflow == NEXT[0][0] else [tensorflow, keras]
        names[1] += " nightly" if keras == NEXT[1][1] else ""
        rows.append(f"| {' | '.join([*names, *shown])} |")
    return "\n".join(rows)


def main(_: Sequence[str]) -> int:
    """Runs the cells that are asked for, one after the other, and writes the table."""
    folder = Path(_FOLDER.value).absolute()
    folder.mkdir(exist_ok=True)
    file = folder / "found.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    found = {name: Result(**result) for name, result in kept.items()}
    for cell in () if _TABLE.value else cells():
        if _ONLY.value and not cell.name.startswith(tuple(_ONLY.value)):
            continue
        result = examine(cell, folder, _SECONDS.value)
        result.day = datetime.date.today().isoformat()
        found[cell.name] = result
        print(
            f"{cell.name}: {'green' if result.green else 'NOT GREEN'}: {result.words}", flush=True
        )
        file.write_text(json.dumps({n: dataclasses.asdict(r) for n, r in found.items()}, indent=1))
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{before}{_BEGIN}\n{table(found)}\n{_END}{after}")
    asked = tuple(_ONLY.value or [""])
    must = [cell.name for cell in cells() if cell.name.startswith(asked) and not cell.may_fail]
    results = [found[name] for name in must if name in found]
    return 0 if all(result.green or result.words.startswith(_NO_WHEEL) for result in results) else 1


if __name__ == "__main__":
    app.run(main)
