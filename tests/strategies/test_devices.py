"""Which GPU a rank takes, up to the border of machines that have none."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from tfdist.launch.flags import checkpoint as checkpoint_flags
from tfdist.strategies import devices


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch):
    for name in (*devices._LOCAL_RANKS, "TF_CONFIG"):
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


def test_a_rank_sees_its_own_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu0", "gpu1"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *what: seen.append(what))
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    devices.pin_gpu()
    assert seen == [("gpu1", "GPU")]
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"local rank 2 .* 2 GPU"):
        devices.pin_gpu()


def test_without_gpus_nothing_is_pinned(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *what: pytest.fail("pinned"))
    devices.pin_gpu()
