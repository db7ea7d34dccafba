"""Which GPU a rank takes, up to the border of machines that have none."""

from __future__ import annotations

import json
import os
import types

import pytest
import tensorflow as tf

from tfdist.launch.flags import checkpoint as checkpoint_flags
from tfdist.runtime.rendezvous import LOCAL_RANK, LOCAL_SIZE, Endpoint, environments, with_interface
from tfdist.strategies import devices

_VARIABLES = (
    LOCAL_RANK,
    devices._HOROVOD_LOCAL_RANK,
    *devices._SCHEDULERS,
    "TF_CONFIG",
    "TFDIST_SHARE_GPUS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
)


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_local_rank_of_horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "3")
    assert devices.local_rank() == 3


def test_local_rank_of_workers_counts_those_of_the_same_host(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "a:2", "b:2"]}
    expected = {("chief", 0): 0, ("worker", 0): 0, ("worker", 1): 1, ("worker", 2): 1}
    for (job, index), place in expected.items():
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert devices.local_rank() == place


def test_a_server_has_no_gpu_of_its_own_and_a_wrong_config_is_told(monkeypatch):
    config = {"cluster": {"worker": ["a:1"], "ps": ["a:2"]}, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert devices.local_rank() == 0
    config["task"] = {"type": "worker", "index": 3}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="TF_CONFIG is not of the form"):
        devices.local_rank()


def test_the_first_worker_of_all_may_be_the_chief(monkeypatch):
    for name in checkpoint_flags._RANKS:
        monkeypatch.delenv(name, raising=False)
    assert checkpoint_flags._may_be_chief()
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["a:2"]}
    expected = {("chief", 0): True, ("worker", 0): False, ("ps", 0): False, ("worker", 7): False}
    for (job, index), may in expected.items():
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert checkpoint_flags._may_be_chief() == may


class Gpus:
    """The GPUs of a machine, and what a rank does with them."""

    def __init__(self, monkeypatch, count: int):
        self.visible, self.growing = [], []
        gpus = [types.SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: self.visible or gpus)
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
        monkeypatch.setattr(tf.config, "set_visible_devices", self._set)
        monkeypatch.setattr(
            tf.config.experimental, "set_memory_growth", lambda gpu, on: self.growing.append(gpu)
        )

    def _set(self, gpu, kind):
        self.visible = [gpu]

    @property
    def taken(self) -> str:
        """The number of the GPU that the rank has taken."""
        return self.visible[0].name.rpartition(":")[2]


def test_a_rank_takes_its_own_gpu_whose_memory_grows(monkeypatch):
    gpus = Gpus(monkeypatch, 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    devices.pin_gpu()
    assert gpus.taken == "1"
    assert gpus.growing == gpus.visible
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"local rank 2 .* 2 GPU"):
        devices.pin_gpu()


def test_the_users_way_of_memory_stays(monkeypatch):
    gpus = Gpus(monkeypatch, 1)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    devices.pin_gpu()
    assert not gpus.growing
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: ["a limit"])
    devices.pin_gpu()
    assert not gpus.growing


def test_a_single_visible_gpu_is_the_launchers_choice(monkeypatch):
    gpus = Gpus(monkeypatch, 1)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    devices.pin_gpu()
    assert gpus.taken == "0"


def test_ranks_share_gpus_only_on_demand(monkeypatch):
    gpus = Gpus(monkeypatch, 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "3")
    monkeypatch.setenv("TFDIST_SHARE_GPUS", "1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")  # The user's stays.
    devices.pin_gpu()
    assert gpus.taken == "1"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        # Inherited from an allocation or an outer launcher, whose only task starts the ranks.
        ({"SLURM_LOCALID": "0", "TF_CONFIG": 1}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "TF_CONFIG": 1}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "HOROVOD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "0", "TFDIST_LOCAL_RANK": "3", "TF_CONFIG": 1}, 3),
        ({"HOROVOD_LOCAL_RANK": "2", "TFDIST_LOCAL_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"SLURM_LOCALID": "2"}, 2),
        ({}, 0),
    ],
)
def test_the_place_is_that_of_the_launcher_of_the_ranks(monkeypatch, variables, place):
    for name, value in variables.items():
        if name == "TF_CONFIG":
            cluster = {"worker": ["a:1", "a:2"]}
            value = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": value}})
        monkeypatch.setenv(name, value)
    assert devices.local_rank() == place


@pytest.mark.parametrize(
    ("engine", "servers"), [("horovod", 0), ("tensorflow", 0), ("tensorflow", 1), ("local", 0)]
)
def test_launchers_name_the_place_of_each_rank_on_its_host(engine, servers):
    if engine == "horovod":
        pytest.importorskip("horovod")
    hosts = [Endpoint(), Endpoint("b", "10.0.0.2", "127.0.0.1", None, 5000), Endpoint()]
    hosts += [Endpoint()] * servers
    with environments(engine, hosts, servers) as found:
        places = [(each.get(LOCAL_RANK), each.get(LOCAL_SIZE)) for each in found]
    assert places == [("0", "2"), ("0", "1"), ("1", "2"), *[(None, None)] * servers]


def test_nccl_has_the_interface_of_the_ranks_unless_the_user_names_one(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with environments("tensorflow", [Endpoint()] * 2) as found:
        assert [each["NCCL_SOCKET_IFNAME"] for each in found] == ["=lo"] * 2
    cluster = {"worker": ["10.1.2.3:1", "127.0.0.1:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    # On the way to the other worker.
    assert with_interface({"TF_CONFIG": json.dumps(config)})["NCCL_SOCKET_IFNAME"] == "=lo"
    given = {"TF_CONFIG": json.dumps(config), "NCCL_SOCKET_IFNAME": "ib0"}
    assert with_interface(given)["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with environments("tensorflow", [Endpoint()] * 2) as found:
        assert not any("NCCL_SOCKET_IFNAME" in each for each in found)


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([(True, "GPU-a"), (False, None), (True, "GPU-b")], r"no GPU on the ranks \[1\] of 3"),
        ([(True, "GPU-a"), (True, "GPU-b"), (True, "GPU-a")], "ranks 0 and 2 with the GPU GPU-a"),
        (
            [(True, "MIG-a"), (True, "MIG-b"), (True, "GPU-b")],
            r"parts of GPUs on the ranks \[0, 1\]",
        ),
    ],
    ids=["mixed", "same", "parts"],
)
def test_devices_of_all_ranks_are_compared(monkeypatch, cards, words):
    monkeypatch.setattr(devices, "all_gather_object", lambda own, group, name: cards)
    engine = types.SimpleNamespace(size=3, group=lambda: None)
    with pytest.raises(ValueError, match=words):
        devices.check_devices(engine)


def test_ranks_that_share_a_gpu_on_demand_or_have_none_are_right(monkeypatch):
    engine = types.SimpleNamespace(size=2, group=lambda: None)
    for cards in ([(False, None)] * 2, [(True, None)] * 2, [(True, "GPU-a"), (True, "GPU-b")]):
        monkeypatch.setattr(devices, "all_gather_object", lambda own, group, name, c=cards: c)
        devices.check_devices(engine)
    monkeypatch.setattr(devices, "all_gather_object", lambda own, group, name: [(True, "a")] * 2)
    with pytest.raises(ValueError, match="ranks 0 and 1"):
        devices.check_devices(engine)
    monkeypatch.setenv("TFDIST_SHARE_GPUS", "1")
    devices.check_devices(engine)


def test_without_gpus_nothing_is_pinned(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *what: pytest.fail("pinned"))
    devices.pin_gpu()
