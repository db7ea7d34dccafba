"""Collectives on a rank with a GPU: where they run, in which group, by which library, and in what order."""

from __future__ import annotations

import pytest

from tests.gpu_like import programs
from tests.gpu_like.stand_in import DEVICE
from tfdist.testing import RankPool

#: What `BaseCollectiveExecutor::CreateCollective` and `NcclManager` of TensorFlow 2.21 take on a GPU.
REDUCED_ON_GPUS = {"float16", "float32", "float64", "int64"}
SENT_ON_GPUS = {*REDUCED_ON_GPUS, "int32"}
FLOATS = ("float16", "bfloat16", "float32", "complex64")


@pytest.fixture(scope="module")
def process():
    with RankPool(1, "local", threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def nodes(process):
    (found,) = process.run(programs.traced_collectives, "auto", True, timeout=120)
    return found


@pytest.mark.timeout(240)
def test_integers_and_bool_go_over_the_host_in_a_ring(nodes):
    integers = [node for node in nodes if node[1] not in FLOATS]
    assert {node[0] for node in integers} >= {"all_reduce", "uneven", "splits", "send"}
    assert all("CPU:0" in device for _, _, _, device, *_ in integers)
    assert {hint for *_, hint, _, _ in integers} == {"ring"}


def test_floats_go_by_nccl_in_dtypes_that_it_takes(nodes):
    by_nccl = [node for node in nodes if node[5] == "nccl"]
    assert {(name, dtype) for name, dtype, *_ in by_nccl} >= {
        (name, dtype) for name in ("sum", "all_gather", "all_to_all") for dtype in FLOATS
    }
    for name, dtype, kind, device, _, _, wire, _ in by_nccl:
        assert DEVICE.strip("/") in device, name
        assert wire in (REDUCED_ON_GPUS if "Reduce" in kind else SENT_ON_GPUS), (name, dtype)
    assert {
        wire for name, dtype, *_, wire, _ in by_nccl if (name, dtype) == ("sum", "bfloat16")
    } == {"float32"}


def test_sums_that_are_scattered_are_one_operation(nodes):
    kinds = {
        kind for name, dtype, kind, *_ in nodes if (name, dtype) == ("reduce_scatter", "float32")
    }
    assert kinds == {"CollectiveReduceScatterV2"}


def test_broadcasts_and_messages_never_go_by_nccl(nodes):
    sent = [node for node in nodes if node[0] in ("broadcast", "send", "recv")]
    assert {node[1] for node in sent} >= set(FLOATS)
    assert all("CPU:0" in device and hint == "ring" for _, _, _, device, _, hint, *_ in sent)


def test_messages_may_go_peer_to_peer_over_the_host(process):
    (found,) = process.run(programs.uses_host, timeout=60)
    assert found == {
        "all_reduce": [False, True],
        "all_gather": [False, True],
        "broadcast": [True, True],
        "send": [True, True],
        "receive": [True, True],
    }


def test_host_and_device_have_groups_of_their_own(nodes):
    keys = {}
    for _, _, kind, device, key, *_ in nodes:
        if "Bcast" not in kind:
            keys.setdefault("CPU:0" in device, set()).add(key)
    assert len(keys[True]) == len(keys[False]) == 1
    assert keys[True] != keys[False]


def test_device_collectives_are_on_one_chain_and_host_ones_are_not(nodes):
    for name, dtype, kind, device, *_, is_independent in nodes:
        if "Bcast" not in kind:  # Those have no chain in TensorFlow.
            assert is_independent == ("CPU:0" in device), (name, dtype)


@pytest.mark.timeout(240)
def test_without_a_gpu_nothing_is_placed(process):
    (found,) = process.run(programs.traced_collectives, "auto", False, timeout=120)
    assert {hint for *_, hint, _, _ in found} == {"auto"}
    assert {node[7] for node in found} == {False}


@pytest.mark.timeout(120)
def test_nothing_waits_for_the_counts_of_collectives(process):
    assert process.run(programs.gates, True, timeout=60) == [(False, False, 2)]
    assert process.run(programs.gates, False, timeout=60) == [(True, True, 2)]


@pytest.mark.timeout(120)
def test_buckets_are_large_and_the_backward_pass_waits_for_none(process):
    # Twelve gradients of 2 MiB are one bucket of a GPU, and six of a CPU.
    assert process.run(programs.throttled, True, 2, timeout=60) == [(1, 0)]
    assert process.run(programs.throttled, True, 64, timeout=60) == [(12, 0)]
    for mib, expected in ((2, 6), (64, 12)):
        ((count, waiting),) = process.run(programs.throttled, False, mib, timeout=60)
        assert count == expected and waiting > 0
