"""Which strategy `auto` takes, and what it refuses."""

from __future__ import annotations

import importlib
import json
import os

import pytest

from tfdist import Mesh, strategies

auto = importlib.import_module("tfdist.strategies.auto")
CLUSTER = {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}


def tf_config(index: int) -> str:
    return json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": index}})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_")) or name == "TF_CONFIG":
            monkeypatch.delenv(name)


def test_a_process_on_its_own_is_local():
    strategy = strategies.auto()
    assert isinstance(strategy, strategies.LocalStrategy)
    assert strategy.mesh.size == 1 and strategy.is_chief
    assert strategy.num_replicas_in_sync == 1


@pytest.mark.parametrize(
    ("gpus", "nccl", "kind"),
    [
        ([], False, "HorovodStrategy"),
        (["gpu"], False, "MultiWorkerStrategy"),
        (["gpu"], True, "HorovodStrategy"),
    ],
)
def test_ranks_with_gpus_get_an_engine_with_nccl(monkeypatch, gpus, nccl, kind):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(auto.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(auto.tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(auto, "has_nccl", lambda: nccl)
    assert auto._detected()[0] == kind


def test_two_launchers_that_disagree(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("TF_CONFIG", tf_config(0))
    with pytest.raises(ValueError, match=r"rank 1 of 4.*rank 0 of 2"):
        strategies.auto()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE=None"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_RANK=None"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "two"}, "HOROVOD_SIZE='two'"),
        ({"HOROVOD_RANK": "-1", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK='-1'"),
    ],
)
def test_half_of_what_a_launcher_sets(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        strategies.auto()


def test_a_malformed_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    with pytest.raises(ValueError, match="TF_CONFIG is not of the form"):
        strategies.auto()


def test_a_mesh_that_does_not_fill_the_world():
    with pytest.raises(ValueError, match="data 2 is 2 ranks, but 1 was"):
        strategies.auto(Mesh(data=2))


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="bucket_mib"):
        strategies.LocalStrategy(bucket_mib=0)
    with pytest.raises(ValueError, match="watchdog_seconds"):
        strategies.LocalStrategy(watchdog_seconds=-1)


def test_an_engine_is_the_launchers():
    with pytest.raises(TypeError, match=r"engine='horovod'.*tfdist-run --engine=tensorflow"):
        strategies.auto(engine="horovod")
