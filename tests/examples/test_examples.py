"""The examples, as a user runs them: one process and two ranks end with the same line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_without

FOLDER = Path(__file__).parents[2] / "examples"
#: `make_preset.py` runs in tests/launch/finetune/test_finetune.py, whose presets it makes; a TPU and Hogwild's
#: threads have no ranks.
OTHERS = ("make_preset.py", "tpu.py", "hogwild.py")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in OTHERS)
#: Of two that show another training for each number of ranks: by how much accuracies may be apart.
APART = {
    "adaptive_batch.py": 0.1,
    "diloco.py": 0.03,
    "dynamic_data.py": 0.03,
    "mnist.py": 0.03,
    "scaled_rate.py": 0.03,
}


def last_line(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1].removeprefix("[0] ")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_print_what_one_process_prints(script, engine):
    skip_without(engine)
    path = str(FOLDER / script)
    launcher = str(Path(sys.executable).with_name("tfdist-run"))
    alone = last_line(sys.executable, path)
    ranks = last_line(launcher, "-np", "2", f"--engine={engine}", "--", sys.executable, path)
    assert "on 1 rank" in alone
    assert "on 2 rank" in ranks
    assert re.search(r"\d\.\d", alone), alone
    numbers = [float(n) for n in re.findall(r"\d+\.\d+", alone)]
    assert [float(n) for n in re.findall(r"\d+\.\d+", ranks)] == pytest.approx(
        numbers, abs=APART.get(script, 0.01)
    )


@pytest.mark.slow
def test_two_threads_of_hogwild_end_where_one_does():
    numbers = re.findall(r"\d+\.\d+", last_line(sys.executable, str(FOLDER / "hogwild.py")))
    one, two = map(float, numbers)
    assert two == pytest.approx(one, abs=0.02) and one < 0.6


def test_the_table_lists_each_with_what_it_prints():
    text = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+\.py)` \|.+\| `(.+)` \|$", text, re.MULTILINE))
    assert sorted(rows) == SCRIPTS
    for line in rows.values():
        assert re.search(r"\d\.\d.* on 2 rank\(s\)\.$", line), line
