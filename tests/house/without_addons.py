"""The tests of the core in a copy of the tree that has no add-ons: `python -m tests.house.without_addons`.

Runs the quick tests of the rooms of floors 1 to 6, of the house and of the extensions. Arguments are
passed to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.floors import levels
from tests.house.sources import ROOT

_MARKS = "not slow"
_NO_FINDERS = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if not repr(each).startswith("<class '__editable__")]
"""


def copy(folder: Path) -> None:
    """Copies the files that git tracks, and compiled libraries, without the add-ons and their tests."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = [Path(name) for name in listed.split("\0") if name]
    files += [path.relative_to(ROOT) for path in ROOT.glob("tfdist/backend/native/tfdist-*.so*")]
    for path in files:
        if path.parts[:2] in (("tfdist", "addons"), ("tests", "addons")):
            continue
        source, target = ROOT / path, folder / path
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def paths() -> list[str]:
    """The tests to run: of the rooms below the highest floor that have a folder, and of the whole core."""
    rooms = [room for level in levels()[:-1] for room in level]
    found = [f"tests/{room}" for room in rooms if (ROOT / "tests" / room).is_dir()]
    return [*found, "tests/house", "tests/test_mesh.py", "tests/test_learning_rate.py"]


def main() -> int:
    """The program; returns the exit code of pytest."""
    with tempfile.TemporaryDirectory(prefix="tfdist-core-") as name:
        folder = Path(name)
        copy(folder)
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        # An editable installation finds what a package of the copy lacks in the checkout.
        (folder / "sitecustomize.py").write_text(_NO_FINDERS)
        check = "import importlib.util, tfdist; print(tfdist.__file__, importlib.util.find_spec('tfdist.addons'))"
        found = subprocess.run(
            [sys.executable, "-c", check],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not found.stdout.startswith(str(folder)) or not found.stdout.endswith(" None\n"):
            raise RuntimeError(f"The copy in {folder} is not what Python imports: {found.stdout}")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", _MARKS]
        return subprocess.run(
            [*command, *(sys.argv[1:] or paths())], cwd=folder, env=environment
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
