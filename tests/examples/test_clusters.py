"""The examples for schedulers, for hosts that come and go, and for TPUs, up to the border of what is here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.examples.test_examples import FOLDER, last_line
from tests.launch.submit import kubernetes_schemas
from tests.launch.train.test_tpu import FAKE

WRITTEN = ("slurm.sh", "kubernetes.yaml")
_QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def commands() -> dict[str, list[str]]:
    """By file, what the README writes it with; without the file's name."""
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    found = {}
    for line in re.findall(r"^tfdist-launch .*--output=.*$", text, re.MULTILINE):
        words = shlex.split(line)
        (output,) = [word for word in words if word.startswith("--output=")]
        words.remove(output)
        found[output.removeprefix("--output=")] = words
    return found


def test_the_readme_writes_each_file_of_the_folder():
    assert sorted(commands()) == sorted(WRITTEN)
    assert sorted(path.name for path in (FOLDER / "cluster").iterdir()) == sorted(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_what_its_command_writes(name):
    _, *words = commands()[name]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch.submit.main", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == (FOLDER / "cluster" / name).read_text()


def test_bash_reads_the_batch_script():
    subprocess.run(["bash", "-n", FOLDER / "cluster" / "slurm.sh"], check=True, timeout=60)


@pytest.mark.parametrize("version", kubernetes_schemas.VERSIONS)
def test_kubernetes_would_take_the_manifest(version):
    objects = list(yaml.safe_load_all((FOLDER / "cluster" / "kubernetes.yaml").read_text()))
    assert [each["kind"] for each in objects] == ["Service", "Job"]
    for each in objects:
        kubernetes_schemas.check(each, version)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ranks_that_come_leave_the_loss_as_it_is(tmp_path):
    script = str(FOLDER / "elastic.py")
    hosts, saved = tmp_path / "hosts", tmp_path / "saved"
    hosts.write_text("localhost:1\n")
    launcher = str(Path(sys.executable).with_name("tfdist-run"))
    job = subprocess.Popen(
        [
            *(launcher, "-np", "2", "--min_np=1", f"--host_discovery_script=cat {hosts}"),
            *("--engine=tensorflow", "--", sys.executable, script, str(saved)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_QUIET,
    )
    try:
        deadline = time.monotonic() + 200
        while not list(saved.glob("step-*/manifest.json")) and job.poll() is None:
            if time.monotonic() > deadline:
                job.terminate()
            time.sleep(0.1)
        hosts.write_text("localhost:2\n")
        said, _ = job.communicate(timeout=250)
    finally:
        job.kill()
    assert job.returncode == 0, said
    starts = re.findall(r"Starts on (\d) rank\(s\) from (.*)\.$", said, re.MULTILINE)
    assert starts[0] == ("1", "the beginning") and starts[-1][0] == "2", said
    assert starts[-1][1].startswith(f"{saved}/step-")
    (loss,) = re.findall(r"Loss (\S+) on 2 rank", said)
    alone = re.search(r"Loss (\S+) on 1 rank", last_line(sys.executable, script))
    assert float(loss) == pytest.approx(float(alone[1]), abs=1e-3)


def test_without_a_tpu_the_example_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "tpu.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=_QUIET,
    )
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("TPU 'local' cannot be used: TensorFlow 2.")
    assert line.endswith("`python examples/train_digits.py` trains without one.")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_on_devices_in_a_tpus_place_the_example_trains():
    begin, _, _ = FAKE.partition("from tfdist.launch.train import")
    run = "import runpy; sys.argv[1:] = ['node-7']; runpy.run_path(PATH, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}PATH = {str(FOLDER / 'tpu.py')!r}\n{run}", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        env=_QUIET,
    )
    assert done.returncode == 0, done.stderr
    assert "('resolve', 'node-7') ('connect', 'Resolver') ('initialize',)" in done.stdout
    accuracy = re.search(r"Accuracy (\S+)%, loss \S+, on 1 core\(s\)\.$", done.stdout.strip())
    assert float(accuracy[1]) > 90
