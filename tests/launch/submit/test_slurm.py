"""`tfdist-launch slurm`: what bash makes of the script, with signals such as Slurm sends."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.launch.submit.job_files import GOLDEN, SCRIPTS, golden
from tfdist.launch.submit.job_flags import Job
from tfdist.launch.submit.sbatch import SlurmOptions, batch_script


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_can_read_it(name):
    finished = subprocess.run(
        ["bash", "-n", GOLDEN / name], capture_output=True, text=True, check=False, timeout=60
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    # Slurm stops to look for its lines at the first command.
    lines = golden(name).splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash"
    assert lines[1 : len(directives) + 1] == directives


class Batch:
    """Runs a batch script, with a `tfdist-run` and a `scontrol` that do as the test says.

    Args:
        folder: Where all of it lies.
        ends: What `tfdist-run` does, in shell.
        job: The job.
        options: Of Slurm.
    """

    def __init__(self, folder, ends, job=None, options=None):
        self.folder = folder
        job = job or Job("test", nodes=1, ranks_per_node=2, command=("train", "a b", "$c"))
        self._program("tfdist-run", 'printf "%s\\n" "$@" > said\n' + ends)
        self._program("scontrol", 'echo "$@" >> calls\n')
        (folder / "job.sh").write_text(batch_script(job, options or SlurmOptions()))
        self.process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=folder,
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _program(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)

    def wait_for(self, name):
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"There is no {name}."
            time.sleep(0.02)

    def finish(self):
        """The exit code, and what was asked of Slurm."""
        output, _ = self.process.communicate(timeout=20)
        calls = self.folder / "calls"
        return self.process.returncode, calls.read_text() if calls.exists() else "", output


#: Ranks that need half a second to save, and note each signal. A stray one would end in 10 s.
SAVES = """
trap 'echo >> heard' TERM
touch ready
for i in {1..500}; do
  [ -e heard ] && sleep 0.5 && exit 76
  sleep 0.02
done
"""


@pytest.mark.parametrize(
    ("code", "calls"), [(0, ""), (1, ""), (2, ""), (75, ""), (76, "requeue 12\n"), (137, "")]
)
def test_only_a_job_that_has_saved_is_queued_again(tmp_path, code, calls):
    assert Batch(tmp_path, f"exit {code}\n").finish()[:2] == (code, calls)
    assert (tmp_path / "said").read_text().splitlines() == [
        *("-np", "2", "--save_seconds=30", "--", "train", "a b", "$c"),
    ]


def test_a_job_may_stay_out_of_the_queue(tmp_path):
    batch = Batch(tmp_path, "exit 76\n", options=SlurmOptions(requeue=False))
    assert batch.finish()[:2] == (76, "")
    script = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --no-requeue" in script and "scontrol" not in script


@pytest.mark.parametrize(
    ("signals", "calls"),
    [
        # The time is nearly up.
        ([signal.SIGUSR1], "requeue 12\n"),
        # It is up before all is saved.
        ([signal.SIGUSR1, signal.SIGTERM], "requeue 12\n"),
        # scancel, which a job does not come back from.
        ([signal.SIGTERM], ""),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], ""),
    ],
)
def test_signals_let_the_ranks_save(tmp_path, signals, calls):
    batch = Batch(tmp_path, SAVES)
    batch.wait_for("ready")
    time.sleep(1.0)  # Until bash waits.
    for number in signals:
        batch.process.send_signal(number)
        time.sleep(0.5)
    assert batch.finish()[:2] == (76, calls)
    assert (tmp_path / "heard").exists()


def test_variables_and_lines_before(tmp_path):
    job = Job(
        "test",
        nodes=1,
        ranks_per_node=2,
        cpus=4,
        command=("train",),
        environment={"NOTE": 'it\'s $5 "net"\nno more', "OMP_NUM_THREADS": "1"},
    )
    ends = 'echo "$NOTE|$OMP_NUM_THREADS|$TF_NUM_INTRAOP_THREADS|$LINE"\n'
    options = SlurmOptions(setup=("LINE='set before'", "export LINE"))
    assert Batch(tmp_path, ends, job, options).finish() == (
        *(0, ""),
        'it\'s $5 "net"\nno more|1|4|set before\n',
    )
