"""Trees of tfdist that can be imported: the checkout as it stands, and that of a commit."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tfdist
from benchmarks.job_variables import outside
from tfdist.launch.flags.command import Failure, UsageError
from tfdist.launch.sessions import run_in_session
from tfdist.utils.checks import one_line

_FOLDER = "commits"
#: Commits before the library of kernels was apart have it at another place.
_FIND = """
try:
    from tfdist.backend.native import TRANSPORT
    print(TRANSPORT.find())
except ImportError:
    from tfdist.native import find_library
    print(find_library())
"""
#: Where `install_native` is, and where it was before `launch/` had a folder for each program.
_INSTALL = """
import pathlib, sys
try:
    from tfdist.launch.install_horovod.native_build import install_native
except ImportError:
    from tfdist.launch.native_build import install_native
print(install_native(pathlib.Path(sys.argv[1])))
"""
#: Python runs this file at its start. An editable installation would import modules that the commit lacks
#: from the checkout.
_CUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of tfdist.

    Attributes:
        folder: The one with `tfdist/` inside.
        commit: What it is, for the report: the commit, and whether files differ from it.
    """

    folder: Path
    commit: str


def checkout() -> Tree:
    """The checkout from which this process runs.

    Raises:
        UsageError: tfdist was not imported from a checkout, or git is not installed.
    """
    folder = Path(tfdist.__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        raise UsageError(
            f"--against requires a git checkout of tfdist. Received: tfdist in {folder}."
        )
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no").strip()
    commit = resolve(folder, "HEAD")
    return Tree(folder, f"{commit[:12]}{' with changes' if changed else ''}")


def resolve(folder: Path, name: str) -> str:
    """The hash of a commit that a branch, a tag or the beginning of a hash names.

    Raises:
        UsageError: There is none of this name.
    """
    try:
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        return _git(folder, *words).strip()
    except Failure:
        raise UsageError(
            f"--against must be a commit of {folder}, such as HEAD~1 or a tag. Received: "
            f"--against={one_line(name, 200)}."
        ) from None


def tree_of(source: Tree, commit: str, work: Path) -> Tree:
    """The tree of a commit, with compiled libraries if the checkout has them.

    Args:
        source: The checkout.
        commit: The hash.
        work: A folder that keeps trees, each in one of its own with the commit's name.

    Raises:
        Failure: Only one of the two trees has a compiled library, or a command failed.
    """
    kept = work.absolute() / _FOLDER
    tree = Tree(kept / commit, commit[:12])
    if not tree.folder.exists():
        kept.mkdir(parents=True, exist_ok=True)
        archive = _run(["git", "-C", str(source.folder), "archive", "--format=tar", commit])
        made = tempfile.mkdtemp(dir=kept)
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as file:
                file.extractall(made, filter="data")
            # In one step: what has been interrupted is no tree.
            os.rename(made, tree.folder)
        except BaseException:
            shutil.rmtree(made)
            raise
    (tree.folder / "sitecustomize.py").write_text(_CUSTOMIZE)
    said = "run tfdist-install-horovod."
    is_compiled = _python(source, _FIND)[-1] != "None"
    if is_compiled:
        # Where no source of it differs, the commit's library is the checkout's.
        libraries = kept / "libraries"
        libraries.mkdir(exist_ok=True)
        for built in source.folder.glob("tfdist/*/*/tfdist-*.so*"):
            shutil.copy(built, libraries)
        *_, said, found = _python(tree, _INSTALL + _FIND, str(libraries))
    else:
        *_, found = _python(tree, _FIND)
    if is_compiled != (found != "None"):
        one, other = (source, tree) if is_compiled else (tree, source)
        raise Failure(f"{one.folder} has the compiled library, and {other.folder} does not: {said}")
    return tree


def _python(tree: Tree, code: str, *arguments: str) -> list[str]:
    """The lines that some code prints which imports tfdist from a tree."""
    variables = {**outside(), "PYTHONPATH": str(tree.folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return _run(command, env=variables).decode(errors="replace").splitlines()


def _git(folder: Path, *words: str) -> str:
    return _run(["git", "-C", str(folder), *words]).decode(errors="replace")


def _run(command: Sequence[str], **options) -> bytes:
    try:
        finished = run_in_session(command, stderr=subprocess.PIPE, **options)
    except FileNotFoundError:
        raise UsageError(f"--against requires {command[0]}, which is not installed.") from None
    if finished.returncode:
        said = finished.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise Failure(f"{' '.join(command[:4])} failed: {said[-1]}")
    return finished.stdout
