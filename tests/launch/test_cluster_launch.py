"""`tfdist-launch`: what it writes for Slurm and Kubernetes, and what it refuses.

Whole files are compared with those of `golden/`. After a change that is meant, write them anew,
and read what has changed:

    .venv/bin/python -m tests.launch.test_cluster_launch
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.launch import kubernetes_schemas
from tfdist.launch.command import UsageError
from tfdist.launch.indexed_job import indexed_job
from tfdist.launch.job_flags import Job, parse_size, parse_time
from tfdist.launch.manifests import to_yaml
from tfdist.launch.mpi_job import mpi_job
from tfdist.launch.pods import Pods
from tfdist.launch.sbatch import SlurmOptions, batch_script

PROGRAM = [sys.executable, "-m", "tfdist.launch.launch"]
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


@pytest.mark.parametrize("name", FILES)
def test_files_are_as_they_were(name):
    assert written(name) == golden(name)


# What Kubernetes makes of it.


def objects(name):
    return list(yaml.safe_load_all(golden(name)))


@pytest.mark.parametrize("version", kubernetes_schemas.VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_would_accept_it(name, version):
    kinds = [each["kind"] for each in objects(name)]
    assert kinds == (["MPIJob"] if "mpijob" in name else ["Service", "Job"])
    for each in objects(name):
        kubernetes_schemas.check(each, version)


WRONG = {
    "job.yaml": [
        ("spec completionsMode", "Indexed"),
        ("spec backoffLimit", "24"),
        ("spec podFailurePolicy rules 0 action", None),
        ("spec template spec containers 0 ressources", {}),
        ("spec template spec containers 0 env 0 value", 1),
        ("metadata label", {}),
        ("spec template", "none"),
    ],
    "mpijob.yaml": [
        ("spec slotPerWorker", 4),
        ("spec slotsPerWorker", "4"),
        ("spec mpiImplementation", "LAM"),
        ("spec runPolicy cleanPodPolicy", "Some"),
        ("spec mpiReplicaSpecs Workers", {}),
        ("spec mpiReplicaSpecs Worker replicas", 0),
        ("spec mpiReplicaSpecs Worker restartPolicy", "Always"),
        ("spec mpiReplicaSpecs Launcher template spec container", []),
        ("spec mpiReplicaSpecs Launcher template spec containers 0 args", "python"),
    ],
}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [(name, *wrong) for name, cases in WRONG.items() for wrong in cases],
)
def test_kubernetes_would_not_accept_anything(name, path, value):
    manifest = objects(name)[-1]
    *parents, last = [int(word) if word.isdigit() else word for word in path.split()]
    part = manifest
    for word in parents:
        part = part[word]
    if value is None:
        del part[last]
    else:
        part[last] = value
    with pytest.raises(kubernetes_schemas.ValidationError):
        kubernetes_schemas.check(manifest, kubernetes_schemas.VERSIONS[-1])


@pytest.fixture
def definition():
    path = os.environ.get("TFDIST_MPIJOB_CRD")
    if not path:
        pytest.skip(
            "TFDIST_MPIJOB_CRD does not name the mpi-operator's definition of MPIJobs: "
            "kubernetes_schemas.py says where it is."
        )
    return path


def test_the_fields_of_an_mpijob_are_those_of_the_operator(definition):
    assert kubernetes_schemas.differences(definition) == []


@pytest.mark.parametrize("name", [name for name in MANIFESTS if "mpijob" in name])
def test_the_operator_would_accept_it(definition, name):
    (manifest,) = objects(name)
    kubernetes_schemas.check_by_definition(manifest, definition)
    broken = copy.deepcopy(manifest)
    broken["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_schemas.ValidationError):
        kubernetes_schemas.check_by_definition(broken, definition)


def as_kubernetes_reads(text, variables):
    """Puts variables in the place of `$(NAME)` by Kubernetes' rules: `$$` is a dollar."""
    found = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

    def read(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return found.sub(read, text)


def only_container(manifest):
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return container


def test_each_pod_of_a_job_is_a_rank():
    service, job = objects("job.yaml")
    container = only_container(job)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 8
    for rank in range(8):
        variables = {}
        for variable in container["env"]:
            # A reference is to what comes before.
            text = variable.get("value", str(rank))
            variables[variable["name"]] = as_kubernetes_reads(text, variables)
        config = json.loads(variables["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": rank}
        hosts = config["cluster"]["worker"]
        # The Job names its pods so, and the Service makes the names known.
        domain = service["metadata"]["name"]
        assert hosts == [f"{job['metadata']['name']}-{n}.{domain}:2222" for n in range(8)]
        assert variables["NOTE"] == "it costs $5, 100%"
        assert variables["TF_NUM_INTRAOP_THREADS"] == "8"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "gpt"}
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "research"


def test_words_reach_the_command_as_they_are():
    words = ("sh", "-c", "echo $HOME $$ $(hostname) $(TF_CONFIG) $$(A)", "yes", "1e3", "")
    job = Job("a", nodes=1, ranks_per_node=1, command=words, environment={"A": "$(TF_CONFIG)$$"})
    _, manifest = yaml.safe_load_all(to_yaml("", indexed_job(job, Pods("image"))))
    container = only_container(manifest)
    everything = {"TF_CONFIG": "x", "A": "y", "hostname": "z"}
    assert tuple(as_kubernetes_reads(word, everything) for word in container["command"]) == words
    (value,) = [each["value"] for each in container["env"] if each["name"] == "A"]
    assert as_kubernetes_reads(value, everything) == "$(TF_CONFIG)$$"
    launcher = mpi_job(job, Pods("image"))["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    called = launcher["spec"]["containers"][0]["command"]
    read = [as_kubernetes_reads(word, everything) for word in called]
    assert tuple(read[-len(words) :]) == words


def test_failures_that_do_not_count():
    spec = objects("job.yaml")[1]["spec"]
    rules = {
        tuple(rule.get("onExitCodes", {}).get("values", ())): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
    }
    # Usage, saved after a SIGTERM, evicted.
    assert rules == {(2,): "FailJob", (76,): "Ignore", (): "Ignore"}
    # Kubernetes takes these rules only where pods are not started again in their place.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == 3 * 8
    # Evicted, the ranks have their time to save, and some to end.
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def launcher_and_worker(name):
    (manifest,) = objects(name)
    assert manifest["spec"]["slotsPerWorker"] == 4
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 2)
    return [replicas[name]["template"]["spec"] for name in ("Launcher", "Worker")]


def test_the_ranks_of_an_mpijob():
    launcher, worker = launcher_and_worker("mpijob.yaml")
    assert shlex.join(launcher["containers"][0]["command"]).startswith(
        "tfdist-run -np 8 -H gpt-worker-0.gpt:4,gpt-worker-1.gpt:4 --save_seconds=60 -- tfdist-train "
    )
    (waiting,) = launcher["initContainers"]
    assert waiting["command"][-2:] == ["gpt-worker-0.gpt", "gpt-worker-1.gpt"]
    needs = worker["containers"][0]["resources"]
    assert needs["limits"] == needs["requests"]
    assert needs["limits"] == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "4"}
    # All are to save when the launcher is told to end.
    assert launcher["terminationGracePeriodSeconds"] > 60


def test_the_ranks_of_mpirun():
    launcher, _ = launcher_and_worker("mpijob_mpirun.yaml")
    command = launcher["containers"][0]["command"]
    env = {each["name"]: each["value"] for each in launcher["containers"][0]["env"]}
    assert command[:4] == ["mpirun", "--allow-run-as-root", "-np", "8"]
    passed = {command[place + 1] for place, word in enumerate(command) if word == "-x"}
    assert passed == {*env, "PATH", "LD_LIBRARY_PATH"}
    assert env["MASTER_ADDR"] == "gpt-worker-0.gpt"
    job = Job("a", nodes=1, ranks_per_node=1, command=("train",))
    user = mpi_job(job, Pods("image", user=7), launcher="mpirun", ssh="/home/a/.ssh")
    assert "--allow-run-as-root" not in to_yaml("", [user])


#: What some version of YAML reads as a number, a truth value, a time, or part of its grammar.
MISREAD = """
    yes No on y N null ~ true 1e3 1 012 0o17 0x1F 1_000 1.5 .5 12:30:00 2026-01-31 -1 -.inf .nan = <<
    ' " a'b"c *a &a !a %a @a `a {a} [a] a: ? - --- | > \\ é 😀
"""


@pytest.mark.parametrize(
    "text",
    [*MISREAD.split(), "", " a", "end ", "- a", "a: b", "a #b", "a\nb", "\t", "\x85"],
)
def test_a_string_is_a_string_to_every_parser(text):
    yielded = to_yaml("", [{"value": text, "values": [text]}])
    assert yaml.safe_load(yielded) == {"value": text, "values": [text]}
    # Quoted, it needs no rule of any version of YAML to be one.
    assert re.search(r"^value: ['\"]", yielded, re.MULTILINE), yielded


def test_words_are_written_without_quotes():
    words = [
        "train",
        "--model=gpt",
        "-np",
        "/data/run-7",
        "registry.example.org/train:1.2",
        "a.b/c",
    ]
    lines = to_yaml("Words", [words]).splitlines()
    assert lines == ["# Words", "---", *(f"- {word}" for word in words)]


def test_nothing_is_written_by_reference():
    for name in MANIFESTS:
        assert not re.search(r"[&*]id\d", golden(name))


# What bash and Slurm make of it.


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
    time.sleep(0.2)  # Until bash waits.
    for number in signals:
        batch.process.send_signal(number)
        time.sleep(0.1)
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


# Flags.


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
    with pytest.raises(UsageError, match="with its units"):
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
        ("", "The scheduler comes first: slurm or kubernetes. Received: nothing."),
        ("pbs -np 2 -- a", "Received: pbs."),
        ("--name=a slurm -np 2 -- a", "Received: --name=a."),
        ("slurm -np 2", "Received: no command."),
        ("slurm -- a", "Say how many ranks there are: -np N"),
        ("slurm --nodes=2 -- a", "Say how many ranks there are: -np N"),
        ("slurm -np 0 -- a", "--np"),
        ("slurm -np 5 --nodes=2 -- a", "Received: -np 5 --nodes=2."),
        ("slurm -np 1 --nodes=2 -- a", "Received: -np 1 --nodes=2."),
        ("slurm -np 5 --ranks_per_node=2 -- a", "Received: -np 5 --ranks_per_node=2."),
        ("slurm -np 4 --nodes=2 --ranks_per_node=4 -- a", "--nodes=2 --ranks_per_node=4."),
        ("slurm -np 2 --time=60 -- a", "Received: --time=60."),
        ("slurm -np 2 --time=1m -- a", "--time is longer. Received: 60 s, --save_seconds=30."),
        ("slurm -np 2 --memory=16 -- a", "Received: --memory=16."),
        ("slurm -np 2 --memory=16K -- a", "Received: --memory=16K."),
        ("slurm -np 2 --env=A -- a", "Received: --env=A."),
        ("slurm -np 2 --env=1A=b -- a", "the name '1A'"),
        ("slurm -np 2 --name='a b' -- a", "Received: --name='a b'."),
        ("slurm -np 2 --name= -- a", "Received: --name=''."),
        ("slurm -np 2 --partition='a #b' -- a", "--partition is a word"),
        ("slurm -np 2 --log='a\"b' -- a", "--log is a word"),
        ("slurm -np 2 --gpu_type=a100 -- a", "--gpu_type is for --gpu."),
        ("slurm -np 2 --sbatch=qos=high -- a", "Received: 'qos=high'."),
        ("slurm -np 2 --sbatch='--qos=a\nrm' -- a", "such as --sbatch=--qos=high"),
        ("slurm -np 2 --image=a -- a", "image"),
        ("slurm -np 2 --output=/nowhere/job.sh -- a", "--output=/nowhere/job.sh cannot be"),
        ("kubernetes -np 2 -- a", "Say what image the pods run"),
        (f"{POD} --partition=a -- a", "partition"),
        (f"{POD} --nodes=2 -- a", "take --kind=mpijob. Received: --nodes=2."),
        (f"{POD} --ssh_auth_mount_path=/a/.ssh -- a", "is for --kind=mpijob. Received"),
        (f"{POD} --launcher=mpirun -- a", "--launcher is for --kind=mpijob."),
        (f"{POD} --name=Train -- a", "--name is a host name in Kubernetes"),
        (f"{POD} --name=7b -- a", "Received: --name=7b."),
        (f"{POD} --name={'a' * 62} -- a", "--name is too long"),
        (f"{POD} --namespace=a.b -- a", "Received: --namespace=a.b."),
        (f"{POD} --volume=data -- a", "Received: --volume=data."),
        (f"{POD} --volume=data:data -- a", "Received: --volume=data:data."),
        (f"{POD} --node_selector=gpu -- a", "--node_selector is written KEY=VALUE"),
        (f"{POD} --env=TF_CONFIG=a -- a", "TF_CONFIG tells each rank which it is"),
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
        assert finished.stderr == f"tfdist-launch: to start it: {submit} {path}\n"
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


if __name__ == "__main__":
    for each in FILES:
        (GOLDEN / each).write_text(written(each), encoding="utf-8")
