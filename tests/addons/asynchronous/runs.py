"""Starting the job of `asynchronous_job.py` by the launcher, and reading what its workers wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).parents[3]


def start(folder, np=3, ps=1, engine="tensorflow", **options) -> subprocess.Popen:
    words = [sys.executable, "-m", "tfdist.launch.run.main", f"--engine={engine}", "-np", str(np)]
    words += [f"--ps={ps}"] if ps else []
    words += ["--", sys.executable, str(JOB), str(folder), json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder, timeout=240, **options) -> tuple[int, str, dict[int, dict]]:
    """The exit code of a job, what it printed, and what each worker that ended well wrote."""
    job = start(folder, **options)
    try:
        output, _ = job.communicate(timeout=timeout)
    finally:
        job.terminate()
    found = {int(path.stem[6:]): json.loads(path.read_text()) for path in folder.glob("worker*")}
    return job.returncode, output, found
