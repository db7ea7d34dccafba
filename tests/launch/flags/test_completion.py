"""Completion of flags and values: what is offered, and that bash and zsh take the script."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tfdist.launch.flags.completion import SHELLS, candidates, script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tfdist-run", "--eng"], ["--engine="]),
        (["tfdist-run", "--engine=t"], ["--engine=tensorflow"]),
        (["tfdist-run", "-np", ""], ["auto"]),
        (["tfdist-run", "-np", "2", "--", "tfdist-tr"], ["tfdist-train"]),
        (["tfdist-run", "-np", "2", "--", "tfdist-train", "--dtype"], ["--dtype_policy="]),
        (["tfdist-run", "-np", "2", "--", "python", "tr"], []),
        (["/a/bin/tfdist-launch", ""], ["slurm", "kubernetes"]),
        (["tfdist-launch", "slurm", "--parti"], ["--partition="]),
        (["tfdist-train", "--det"], ["--deterministic"]),
        (["tfdist-train", "--dataset=te"], []),
        (["tfdist-train", "--no-such-flag=te"], []),
        (["cat", "--en"], []),
    ],
)
def test_flags_and_values_are_offered(words, expected):
    assert candidates("zsh", len(words) - 1, words) == expected


def test_bash_cuts_words_at_equals():
    for words in (["tfdist-run", "--engine", "="], ["tfdist-run", "--engine", "=", ""]):
        assert candidates("bash", len(words) - 1, words) == ["auto", "horovod", "tensorflow"]
    words = ["tfdist-run", "--engine", "=", "te"]
    assert candidates("bash", 3, words) == ["tensorflow"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_takes_the_script(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed.")
    done = subprocess.run(
        [shell, "-n"], input=script(shell), capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0 and not done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed.")
def test_bash_completes_as_a_user_sees_it():
    lines = [
        script("bash"),
        'COMP_WORDS=(tfdist-run --engine = ho); COMP_CWORD=3; _tfdist; echo "${COMPREPLY[@]}"',
        "complete -p tfdist-train",
    ]
    done = subprocess.run(
        ["bash", "--norc"], input="\n".join(lines), capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines()[0] == "horovod", done
    assert "-F _tfdist tfdist-train" in done.stdout


def test_nothing_slow_is_imported():
    code = "import sys; from tfdist.launch.flags.completion import candidates; "
    code += "candidates('zsh', 1, ['tfdist-train', '--m']); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
