"""Whole files that `tfdist-launch` writes, and how it is called for them.

They lie in `golden/`. After a change that is meant, write them anew, and read what has changed:

    .venv/bin/python -m tests.launch.submit.job_files
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

PROGRAM = [sys.executable, "-m", "tfdist.launch.submit.main"]
GOLDEN = Path(__file__).parent / "golden"
#: The same job for every scheduler: eight ranks, and something of each flag that they share.
SHARED = """
    --name=gpt --cpus=8 --memory=16G --gpu --time=1d12h --max_restarts=3 --save_seconds=60
    --env=RUN=7 --env='NOTE=it costs $5, 100%' --chdir=/data
"""
TRAIN = "-- tfdist-train --model=gpt --zero_stage=3 --workdir=/data/run-7"
ON_PODS = """
    --image=registry.example.org/train:1.2 --namespace=research --volume=data:/data
    --volume=corpus:/corpus:ro --shared_memory=8G --node_selector=example.org/gpu=a100 --queue=team
"""
FILES = {
    "slurm_small.sh": "slurm -np 4 -- python train.py",
    "slurm.sh": f"""slurm {SHARED} -np 8 --nodes=2 --partition=gpu --account=physics
        --gpu_type=a100 --log=logs/%x-%j.out --engine=horovod --setup='module load cuda'
        --setup='source /data/venv/bin/activate' --sbatch=--qos=high --sbatch=--exclusive {TRAIN}""",
    "job_small.yaml": "kubernetes -np 2 --image=train:1 -- python train.py",
    "job.yaml": f"kubernetes {SHARED} {ON_PODS} -np 8 --run_as_user=1000 {TRAIN}",
    "mpijob_small.yaml": "kubernetes --kind=mpijob -np 2 --nodes=2 --image=train:1 -- python train.py",
    "mpijob.yaml": f"""kubernetes {SHARED} {ON_PODS} --kind=mpijob --nodes=2 --ranks_per_node=4
        --run_as_user=1000 --ssh_auth_mount_path=/home/mpiuser/.ssh {TRAIN}""",
    "mpijob_mpirun.yaml": f"""kubernetes {SHARED} {ON_PODS} --kind=mpijob --launcher=mpirun -np 8
        --nodes=2 {TRAIN}""",
    "trainjob_small.yaml": "kubernetes --kind=trainjob -np 2 --nodes=2 --image=train:1 -- python train.py",
    "trainjob.yaml": f"""kubernetes {SHARED} {ON_PODS} --kind=trainjob --nodes=2 --ranks_per_node=4
        --run_as_user=1000 {TRAIN}""",
}
MANIFESTS = [name for name in FILES if name.endswith(".yaml")]
SCRIPTS = [name for name in FILES if name.endswith(".sh")]


def launch(*arguments, **options):
    options = {"env": {**os.environ, "COLUMNS": "80"}} | options
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


def written(name):
    finished = launch(*shlex.split(FILES[name]))
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def golden(name):
    return (GOLDEN / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in FILES:
        (GOLDEN / each).write_text(written(each), encoding="utf-8")
