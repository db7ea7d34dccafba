"""Checks of the installed packages: versions, compatibility and imports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tfdist import __version__
from tfdist.launch.doctor import trial
from tfdist.launch.doctor.findings import Finding, answer_of, ended_by, note, ok, problem
from tfdist.launch.install_horovod.prerequisites import (
    GLOO_ONLY,
    PrerequisiteError,
    check_toolchain,
    installed_version,
)
from tfdist.runtime.versions import TESTED, minor_version

#: Distributions that all have the module `tensorflow`, of which the last one installed is imported.
_TENSORFLOWS = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm"),
    *("tf-nightly", "tf-nightly-cpu"),
)
_SHOWN = ("tensorflow", "keras")


def python() -> list[Finding]:
    """Check Python and the installation of tfdist."""
    where = Path(__file__).parents[2]
    found = [ok("tfdist", f"{__version__}, in {where}")]
    version = platform.python_version()
    try:
        wanted = importlib.metadata.metadata("tfdist")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return [
            *found,
            note("Python", f"{version}, {sys.executable}"),
            problem(
                "tfdist",
                "it is imported from a folder, and is not installed for this Python",
                f"{sys.executable} -m pip install tfdist, or `pip install -e .` in a checkout",
            ),
        ]
    if wanted and version not in SpecifierSet(wanted):
        return [
            *found,
            problem(
                "Python",
                f"{version}, but tfdist requires {wanted}",
                "Create an environment with that version.",
            ),
        ]
    return [*found, ok("Python", f"{version}, {sys.executable}")]


def packages() -> list[Finding]:
    """Compare tfdist's requirements with the installed packages."""
    try:
        wanted = importlib.metadata.requires("tfdist") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # `python` reports it.
    found, fine = [], 0
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, version = requirement.name, installed_version(requirement.name)
        shown = {"tensorflow": "TensorFlow", "keras": "Keras"}.get(name, name)
        if name == "tensorflow":
            version = version or next(filter(None, map(installed_version, _TENSORFLOWS)), None)
        if version is None:
            found.append(problem(shown, "not installed", _install(requirement)))
        elif not requirement.specifier.contains(version, prereleases=True):
            text = f"{version}, but tfdist requires {_range_of(requirement)}"
            found.append(problem(shown, text, _install(requirement)))
        elif name in _SHOWN:
            found.append(ok(shown, version))
        else:
            fine += 1
    several = [name for name in _TENSORFLOWS if installed_version(name)]
    if len(several) > 1:
        text = f"{' and '.join(several)} are installed over each other"
        found.append(problem("TensorFlow", text, _reinstall(several)))
    tensorflow, keras = map(installed_version, _SHOWN)
    if tensorflow and keras and (minor_version(tensorflow), minor_version(keras)) not in TESTED:
        text = f"TensorFlow {tensorflow} with Keras {keras} is in the range, but was not tested"
        found.append(note("Versions", text))
    return [*found, ok("Others", f"{fine} required packages, with supported versions")]


def _range_of(requirement: Requirement) -> str:
    return ", ".join(sorted(map(str, requirement.specifier), reverse=True)) or "any version"


def _install(requirement: Requirement) -> str:
    wanted = f"{requirement.name}{requirement.specifier}"
    return f"{sys.executable} -m pip install '{wanted}'"


def _reinstall(names: list[str]) -> str:
    pip = f"{sys.executable} -m pip"
    return f"{pip} uninstall {' '.join(names)}, then {pip} install one of them"


def settings() -> list[Finding]:
    """Check settings that are known to break Keras or TensorFlow under tfdist."""
    found = []
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        text = f"TF_USE_LEGACY_KERAS={os.environ['TF_USE_LEGACY_KERAS']}: tf.keras is Keras 2"
        found.append(problem("Keras", text, "unset TF_USE_LEGACY_KERAS"))
    backend, place = _backend()
    if backend != "tensorflow":
        text = f"its backend is {backend}, by {place}; tfdist requires the backend tensorflow"
        found.append(problem("Keras", text, "export KERAS_BACKEND=tensorflow"))
    return found


def _backend() -> tuple[str, str]:
    """Keras' backend, and the source of the setting."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    file = Path(home) / "keras.json"
    try:
        return json.loads(file.read_text()).get("backend", "tensorflow"), str(file)
    except (OSError, ValueError, AttributeError):
        return "tensorflow", "default"  # As Keras does.


def horovod() -> list[Finding]:
    """Check whether Horovod was built for the installed TensorFlow."""
    version = installed_version("horovod")
    if version is None:
        return []  # The trial reports it.
    built_for, has = _built_for(), _tensorflow()
    if built_for and has and built_for != has:
        text = f"{version}, built for TensorFlow {built_for}, but TensorFlow {has} is installed"
        return [problem("Horovod", text, "tfdist-install-horovod --force")]
    return [ok("Horovod", version + (f", built for TensorFlow {built_for}" if built_for else ""))]


def _tensorflow() -> str | None:
    return next(filter(None, map(installed_version, _TENSORFLOWS)), None)


def _built_for() -> str | None:
    """The TensorFlow version that Horovod was built for, from its metadata; None if unknown."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            noted = json.loads((Path(folder) / "metadata.json").read_text())
        except (OSError, ValueError):
            continue
        if isinstance(noted, dict) and isinstance(noted.get("tensorflow"), str):
            return noted["tensorflow"]
    return None


def compiler() -> list[Finding]:
    """Check the toolchain for Horovod and the native library; a problem only if one must be built."""
    try:
        check_toolchain(GLOO_ONLY)
    except PrerequisiteError as error:
        text, _, remedy = str(error).partition(": ")
        remedy = remedy or str(error)
        if installed_version("horovod") and _built_for() == _tensorflow():
            return [note("Compiler", f"{text}; Horovod is built already", remedy)]
        return [problem("Compiler", f"{text}; tfdist-install-horovod requires it", remedy)]
    return [ok("Compiler", "C++ compiler, CMake and make are installed")]


class Trials:
    """Trial imports of TensorFlow, Keras, tfdist and Horovod in a separate process, which may crash.

    Several checks use the result from different threads.

    Args:
        seconds: Time limit of the process.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._answer: tuple[dict[str, dict], str] | None = None

    def imports(self) -> list[Finding]:
        """Report whether the packages can be imported."""
        found, ending = self._results()
        lines = [_shown(name, found[name]) for name in trial.STEPS if name in found]
        missing = next((name for name in trial.STEPS if name not in found), None)
        if missing is not None and ending:
            lines.append(problem(trial.STEPS[missing], ending, trial.REMEDIES[missing]))
        return lines

    def gpus(self) -> list[str]:
        """Names of the GPUs that TensorFlow finds."""
        return self._results()[0].get("tensorflow", {}).get("gpus", [])

    @property
    def is_built_with_cuda(self) -> bool:
        """Whether TensorFlow is built for NVIDIA GPUs."""
        return bool(self._results()[0].get("tensorflow", {}).get("cuda"))

    @property
    def has_onednn(self) -> bool | None:
        """Whether TensorFlow uses oneDNN on this processor; None if TensorFlow does not work."""
        return self._results()[0].get("tensorflow", {}).get("onednn")

    def _results(self) -> tuple[dict[str, dict], str]:
        with self._lock:
            if self._answer is None:
                self._answer = self._try()
            return self._answer

    def _try(self) -> tuple[dict[str, dict], str]:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        # As a rank it would try to connect to the others.
        for name in list(environment):
            if name.startswith("HOROVOD_") or name == "TF_CONFIG":
                del environment[name]
        command = [sys.executable, "-m", trial.__name__]
        code, output, errors = answer_of(command, self._seconds, environment)
        found = {line["step"]: line for line in _lines(output)}
        if code is None:
            return found, f"importing it did not end within {self._seconds:g} s"
        if code == 0:
            return found, ""
        words = errors.strip().splitlines()[-1:] if code > 0 else []
        return found, f"importing it failed: {ended_by(code)}{''.join(f' ({w})' for w in words)}"


def _lines(output: str) -> Iterator[dict]:
    for line in output.splitlines():
        if line.startswith(trial.PREFIX):
            yield json.loads(line.removeprefix(trial.PREFIX))


def _shown(name: str, found: dict) -> Finding:
    what = trial.STEPS[name]
    if found.get("error"):
        return problem(what, found["error"], found.get("remedy") or trial.REMEDIES[name])
    if found.get("missing"):
        return note(what, found["missing"], trial.REMEDIES[name])
    return ok(what, found["text"])
