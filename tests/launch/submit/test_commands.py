"""`tfdist-launch`: the files it writes, and what it refuses."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.launch.submit.job_files import FILES, golden, launch, written
from tfdist.launch.flags.command import UsageError
from tfdist.launch.submit.job_flags import parse_size, parse_time


@pytest.mark.parametrize("name", FILES)
def test_files_are_as_they_were(name):
    assert written(name) == golden(name)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("90m", 5400),
        ("12h", 43_200),
        ("1d12h", 129_600),
        ("1d2h3m4s", 93_784),
        ("01:30:00", 5400),
        ("100:00:00", 360_000),
        ("1-12:00:00", 129_600),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "60", "1:30", "0h", "00:00:00", "12h1d", "1.5h", "-1h", "h"])
def test_what_is_no_time(text):
    with pytest.raises(UsageError, match="must have units"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "mebibytes"), [("500M", 500), ("16G", 16_384), ("16Gi", 16_384), ("16GiB", 16_384)]
)
def test_sizes(text, mebibytes):
    assert parse_size("memory", text) == mebibytes


@pytest.mark.parametrize(
    ("arguments", "nodes", "per_node"),
    [
        ("-np 4", 1, 4),
        ("-np 4 --nodes=2", 2, 2),
        ("-np 4 --ranks_per_node=1", 4, 1),
        ("--ranks_per_node=3", 1, 3),
        ("--nodes=2 --ranks_per_node=3", 2, 3),
        ("-np 6 --nodes=2 --ranks_per_node=3", 2, 3),
    ],
)
def test_nodes_and_ranks(arguments, nodes, per_node):
    finished = launch("slurm", *arguments.split(), "train")
    assert f"--nodes={nodes}\n#SBATCH --ntasks-per-node={per_node}\n" in finished.stdout
    assert f"tfdist-run -np {nodes * per_node} " in finished.stdout


POD = "kubernetes -np 2 --image=train:1"
MPI = "kubernetes --kind=mpijob -np 2 --image=train:1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "The scheduler must be the first argument: slurm or kubernetes. Received: nothing."),
        ("pbs -np 2 -- a", "Received: pbs."),
        ("--name=a slurm -np 2 -- a", "Received: --name=a."),
        ("slurm -np 2", "Received: no command."),
        ("slurm -- a", "requires the number of ranks: -np N"),
        ("slurm --nodes=2 -- a", "requires the number of ranks: -np N"),
        ("slurm -np 0 -- a", "--np"),
        ("slurm -np 5 --nodes=2 -- a", "Received: -np 5 --nodes=2."),
        ("slurm -np 1 --nodes=2 -- a", "Received: -np 1 --nodes=2."),
        ("slurm -np 5 --ranks_per_node=2 -- a", "Received: -np 5 --ranks_per_node=2."),
        ("slurm -np 4 --nodes=2 --ranks_per_node=4 -- a", "--nodes=2 --ranks_per_node=4."),
        ("slurm -np 2 --time=60 -- a", "Received: --time=60."),
        (
            "slurm -np 2 --time=1m -- a",
            "at which the ranks save. Received: 60 s, --save_seconds=30.",
        ),
        ("slurm -np 2 --memory=16 -- a", "Received: --memory=16."),
        ("slurm -np 2 --memory=16K -- a", "Received: --memory=16K."),
        ("slurm -np 2 --env=A -- a", "Received: --env=A."),
        ("slurm -np 2 --env=1A=b -- a", "the name '1A'"),
        ("slurm -np 2 --name='a b' -- a", "Received: --name='a b'."),
        ("slurm -np 2 --name= -- a", "Received: --name=''."),
        ("slurm -np 2 --partition='a #b' -- a", "--partition must be a word"),
        ("slurm -np 2 --log='a\"b' -- a", "--log must be a word"),
        ("slurm -np 2 --gpu_type=a100 -- a", "--gpu_type requires --gpu."),
        ("slurm -np 2 --sbatch=qos=high -- a", "Received: 'qos=high'."),
        (
            "slurm -np 2 --sbatch='--qos=a\nrm' -- a",
            "--sbatch must be a text in UTF-8 without control",
        ),
        ("slurm -np 2 --image=a -- a", "image"),
        ("slurm -np 2 --output=/nowhere/job.sh -- a", "--output=/nowhere/job.sh cannot be"),
        ("kubernetes -np 2 -- a", "requires an image"),
        (f"{POD} --partition=a -- a", "partition"),
        (f"{POD} --nodes=2 -- a", "Received: --nodes=2. Use -np, or another kind."),
        (f"{POD} --ssh_auth_mount_path=/a/.ssh -- a", "requires --kind=mpijob. Received"),
        (f"{POD} --launcher=mpirun -- a", "--launcher requires --kind=mpijob."),
        (f"{POD} --name=Train -- a", "--name must be a host name in Kubernetes"),
        (f"{POD} --name=7b -- a", "Received: --name=7b."),
        (f"{POD} --name={'a' * 62} -- a", "--name must be shorter"),
        (f"{POD} --namespace=a.b -- a", "Received: --namespace=a.b."),
        (f"{POD} --volume=data -- a", "Received: --volume=data."),
        (f"{POD} --volume=data:data -- a", "Received: --volume=data:data."),
        (f"{POD} --node_selector=gpu -- a", "--node_selector must be KEY=VALUE"),
        (f"{POD} --env=TF_CONFIG=a -- a", "TF_CONFIG cannot be set by --env"),
        (f"{POD} --shared_memory=0 -- a", "Received: --shared_memory=0."),
        (f"{MPI} --name={'a' * 55} -- a", f"{'a' * 55}-worker-0"),
        (f"{MPI} --run_as_user=1000 -- a", "--ssh_auth_mount_path=/home/NAME/.ssh"),
    ],
)
def test_refusals(arguments, said):
    finished = launch(*shlex.split(arguments))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("tfdist-launch: ")
    assert len(finished.stderr.splitlines()) == 1
    assert said in finished.stderr


def test_a_file_is_written(tmp_path):
    for name, submit in (("slurm_small.sh", "sbatch"), ("job_small.yaml", "kubectl apply -f")):
        scheduler, *rest = shlex.split(FILES[name])
        path = tmp_path / name
        finished = launch(scheduler, f"--output={path}", *rest)
        assert (finished.returncode, finished.stdout) == (0, "")
        assert finished.stderr == f"tfdist-launch: start it with: {submit} {path}\n"
        assert path.read_text(encoding="utf-8") == golden(name)


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_help_fits_a_screen_and_names_all_flags(scheduler):
    short, full = (launch(scheduler, flag) for flag in ("--help", "--helpfull"))
    assert short.returncode == full.returncode == 0
    assert f"Usage: tfdist-launch {scheduler} [flags] -- command" in short.stdout
    assert len(short.stdout.splitlines()) < 24
    assert max(map(len, [*short.stdout.splitlines(), *full.stdout.splitlines()])) <= 80
    names = [name.replace("[no]", "") for name in re.findall(r"^(--[\[\]\w]+)", full.stdout, re.M)]
    assert {"--np", "--time", "--save_seconds"} < set(names)
    assert set(names) <= set(re.findall(r"--\w+", short.stdout))


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpfull"])
def test_help_names_the_schedulers(flag):
    finished = launch(flag)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "slurm or kubernetes" in finished.stdout.replace("\n", " ")
