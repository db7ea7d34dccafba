"""`tfdist-launch kubernetes`: whether Kubernetes would take it, and what it would make of it."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex

import pytest
import yaml

from tests.launch.submit import kubernetes_schemas
from tests.launch.submit.job_files import MANIFESTS, golden
from tfdist.launch.submit.indexed_job import indexed_job
from tfdist.launch.submit.job_flags import Job
from tfdist.launch.submit.manifests import to_yaml
from tfdist.launch.submit.mpi_job import mpi_job
from tfdist.launch.submit.pods import Pods


def objects(name):
    return list(yaml.safe_load_all(golden(name)))


KINDS = {
    "job": ["Service", "Job"],
    "mpijob": ["MPIJob"],
    "trainjob": ["TrainingRuntime", "TrainJob"],
}


@pytest.mark.parametrize("version", kubernetes_schemas.VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_would_accept_it(name, version):
    kinds = [each["kind"] for each in objects(name)]
    assert kinds == KINDS[name.removesuffix(".yaml").partition("_")[0]]
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
    "trainjob.yaml": [
        ("0 spec mlPolicy tensorflow", {}),
        ("0 spec mlPolicy numNodes", "2"),
        ("0 spec template spec replicatedJobs 0 template spec backOffLimit", 0),
        ("0 spec template spec replicatedJobs 0 template spec template spec container", []),
        ("0 spec template spec failurePolicy maxRestarts", "3"),
        ("0 spec template spec failurePolicy rules 0 onJobFailureReason", []),
        ("1 spec runtimeRef name", None),
        ("1 spec trainer numProcPerNode", "4"),
        ("1 spec trainers", {}),
    ],
}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [(name, *wrong) for name, cases in WRONG.items() for wrong in cases],
)
def test_kubernetes_would_not_accept_anything(name, path, value):
    *parents, last = [int(word) if word.isdigit() else word for word in path.split()]
    part = manifest = objects(name)[parents.pop(0) if isinstance(parents[0], int) else -1]
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


@pytest.mark.parametrize("name", ["trainjob_small.yaml", "trainjob.yaml"])
def test_the_nodes_of_a_train_job(name):
    runtime, job = objects(name)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer gives its variables to the container of this name, in the Job of this label.
    assert node["name"] == "node"
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node" and container["command"][0] == "tfdist-run"
    assert job["spec"]["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert runtime["metadata"].get("namespace") == job["metadata"].get("namespace")
    nodes = job["spec"]["trainer"]["numNodes"]
    assert nodes == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    ranks = job["spec"]["trainer"]["numProcPerNode"]
    cpus = int(container["resources"]["limits"]["cpu"])
    assert (ranks, cpus) == ((1, 1) if "small" in name else (4, 32))
