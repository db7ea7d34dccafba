"""`python -m benchmarks.environments`: makes the environments in which the others train."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.launch.flags import command
from tfdist.launch.flags import values as flag_values
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.install_horovod.build import BuildError, build
from tfdist.launch.install_horovod.prerequisites import PrerequisiteError
from tfdist.launch.sessions import run_in_session
from tfdist.launch.signals import exit_on_signals


@dataclasses.dataclass(frozen=True)
class EnvironmentsOptions:
    """The options of the program; see the flags of the same names."""

    peers: str = option(".peers", "The folder for the environments")


_FLAGS = define_flags(EnvironmentsOptions)

#: A file in an environment that was made to the end: what it was asked for, and what came.
MADE = ".made"

#: By folder, what pip installs. Both TensorFlows are one version, and so share a build of Horovod.
ENVIRONMENTS = {
    "tf_keras": (
        f"tensorflow=={importlib.metadata.version('tensorflow')}",
        "tf_keras>=2.21,<2.22",
        "cloudpickle>=3.0",
        "packaging>=23",
        "psutil>=5.9",
        "pyyaml>=6",
    ),
    # Keras as in the environment of tfdist: one `fit` on two backends.
    "jax": ("jax[cpu]==0.10.2", f"keras=={importlib.metadata.version('keras')}", "numpy>=2.0"),
    # Apart, because KerasHub brings TensorFlow.
    "keras_hub_jax": (
        "jax[cpu]==0.10.2",
        f"keras=={importlib.metadata.version('keras')}",
        "keras-hub>=0.32,<0.33",
        "numpy>=2.0",
    ),
    "torch": (
        "torch==2.13.0",
        "numpy>=2.0",
        "transformers==5.24.0",
        "peft==0.21.2",
        "trl==1.16.0",
    ),
}
#: Those whose environment has Horovod.
_WITH_HOROVOD = ("tf_keras",)
_NAMED = (
    "tensorflow",
    "keras",
    "tf_keras",
    "keras_hub",
    "horovod",
    "jax",
    "torch",
    "transformers",
    "peft",
)


def run(arguments: list[str] | None = None) -> None:
    """Runs the program; its arguments begin with its name."""
    PROGRAM.run(arguments)


def _check(_: list[str]) -> str:
    peers = _FLAGS.read().peers
    flag_values.folder("peers", peers)
    return peers


def _main(peers: str) -> int:
    if not peers.strip():
        raise command.UsageError(
            "--peers must be the folder for the environments. Received: --peers= without a folder."
        )
    try:
        with exit_on_signals():
            for name in ENVIRONMENTS:
                make(name, Path(peers))
    except (OSError, PrerequisiteError) as error:
        raise command.UsageError(str(error)) from None
    except BuildError as error:
        command.say("benchmarks", str(error))
        return 1
    except KeyboardInterrupt:
        command.say("benchmarks", "Stopped.")
        return 130
    return 0


def make(name: str, peers: Path) -> None:
    """Makes an environment, unless it was made of the same before.

    Raises:
        BuildError: pip failed, or the build of Horovod did.
        PrerequisiteError: Something is missing that the user has to install.
    """
    folder = peers / name
    made = folder / MADE
    asked = list(ENVIRONMENTS[name])
    if made.exists() and json.loads(made.read_text() or "{}").get("asked") == asked:
        print(f"{folder} was made before.")
        return
    made.unlink(missing_ok=True)
    print(f"Making {folder} of {', '.join(asked)}", flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(folder)])
    _pip(folder, asked)
    if name in _WITH_HOROVOD:
        _pip(folder, ["--no-deps", str(build())])
    made.write_text(json.dumps({"asked": asked, "versions": _installed(folder)}) + "\n")


def versions(environment: str | None, peers: Path) -> str:
    """The versions of what matters in an environment; None is the one of tfdist."""
    if environment is None:
        found = {name: _version(name) for name in _NAMED}
    else:
        found = json.loads((peers / environment / MADE).read_text())["versions"]
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed(folder: Path) -> dict[str, str]:
    listed = json.loads(_call([*_pip_of(folder), "list", "--format=json"]))
    found = {line["name"].lower().replace("-", "_"): line["version"] for line in listed}
    return {name: found[name] for name in _NAMED if name in found}


def _pip(folder: Path, what: Sequence[str]) -> None:
    _call([*_pip_of(folder), "install", "--quiet", *what])


def _pip_of(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _call(arguments: Sequence[str]) -> str:
    finished = run_in_session(arguments, stderr=subprocess.PIPE, text=True)
    if finished.returncode:
        said = "\n".join((finished.stderr or finished.stdout).strip().splitlines()[-10:])
        raise BuildError(f"{said}\n`{' '.join(arguments[1:5])}` failed, see above.")
    return finished.stdout


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="python -m benchmarks.environments [flags]",
    summary="Makes the environments of those that `python -m benchmarks.training` compares with, where "
    "they are not there yet: a GB or two each.",
    check=_check,
)


if __name__ == "__main__":
    run()
