"""What Slurm says of an allocation: lists of nodes, tasks on them, and errors in both."""

from __future__ import annotations

import itertools
import random

import pytest

from tfdist.launch.flags.command import UsageError
from tfdist.launch.run.hosts import Host
from tfdist.launch.run.slurm import allocated_hosts, expand_tasks_per_node, in_allocation
from tfdist.runtime.slurm import expand_node_list


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", "login"),
        ("a1,b,c-3.example.org", "a1 b c-3.example.org"),
        ("a[1-3]", "a1 a2 a3"),
        ("a[1-3,5,007-010]", "a1 a2 a3 a5 a007 a008 a009 a010"),
        # The first of a range says how many digits there are at least.
        ("a[08-11]", "a08 a09 a10 a11"),
        ("a[8-11]", "a8 a9 a10 a11"),
        ("a[098-101]", "a098 a099 a100 a101"),
        ("a[001-2]", "a001 a002"),
        ("a[0]", "a0"),
        ("n[1-2]-ib0", "n1-ib0 n2-ib0"),
        ("[1-2]", "1 2"),
        ("[1-2]a", "1a 2a"),
        ("r[1-2]n[01-03]", "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03"),
        ("r[1,3]n[1-2]-ib,x[5]", "r1n1-ib r1n2-ib r3n1-ib r3n2-ib x5"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        # Of three groups Slurm has the second run slowest.
        ("a[1-2]b[1-2]c[1-2]", "a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2"),
        ("a[1-2],b,c[3-4]", "a1 a2 b c3 c4"),
        ("a,a", "a a"),
        (" a[1-2]\n", "a1 a2"),
    ],
)
def test_node_lists(text, nodes):
    assert expand_node_list(text) == nodes.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a name is empty"),
        ("a,,b", "a name is empty"),
        ("a,", "a name is empty"),
        ("a[1-2", "brackets do not match"),
        ("a1-2]", "brackets do not match"),
        ("a[[1-2]]", "brackets do not match"),
        ("a]1[", "brackets do not match"),
        ("a[]", "[] contains ''"),
        ("a[1,]", "[1,] contains ''"),
        ("a[1-]", "[1-] contains '1-'"),
        ("a[-2]", "[-2] contains '-2'"),
        ("a[1-2-3]", "contains '1-2-3'"),
        ("a[b-c]", "contains 'b-c'"),
        ("a[000x133]", "contains '000x133'"),
        ("a[1 - 2]", "contains '1 - 2'"),
        ("a[٣]", "contains '٣'"),
        ("a[3-1]", "'3-1' runs backwards"),
        ("a b", "' ' is out of place in 'a b'"),
        ("a(x2)", "'(' is out of place"),
        ("a[1-99999999999]", "more than 65536 nodes"),
        ("a[1-300]b[1-300]", "more than 65536 nodes"),
        ("a[1-40000],b[1-40000]", "more than 65536 nodes"),
    ],
)
def test_what_is_no_node_list(text, why):
    with pytest.raises(ValueError) as refused:
        expand_node_list(text)
    assert why in str(refused.value)
    assert repr(text) in str(refused.value) and "scontrol show hostnames" in str(refused.value)


def test_node_lists_of_any_form():
    """Lists are put together at random, beside the nodes that they stand for."""
    dice = random.Random(7)
    for _ in range(300):
        texts, nodes = zip(*(_random_item(dice) for _ in range(dice.randint(1, 4))), strict=True)
        assert expand_node_list(",".join(texts)) == [*itertools.chain(*nodes)], texts


def _random_item(dice):
    """A name with up to two groups, and the nodes it stands for."""
    text = dice.choice("abn")
    nodes = [text]
    for _ in range(dice.randint(0, 2)):
        group, numbers = _random_group(dice)
        end = dice.choice(["", "x", "-ib", "."])
        text += f"[{group}]{end}"
        nodes = [node + number + end for node in nodes for number in numbers]
    return text, nodes


def _random_group(dice):
    parts, numbers = [], []
    for _ in range(dice.randint(1, 3)):
        first, width = dice.randint(0, 120), dice.randint(1, 4)
        run = [f"{number:0{width}d}" for number in range(first, first + dice.randint(1, 12))]
        parts.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}")
        # What is written, 98 or 098, says how wide the others are.
        numbers += [f"{int(number):0{len(run[0])}d}" for number in run]
    return ",".join(parts), numbers


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", [4]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("1,2(x2),16", [1, 2, 2, 16]),
        ("3(x1)", [3]),
        ("2(x2),2", [2, 2, 2]),
    ],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text", ["", "2,", "0", "2(x0)", "2(3)", "2x3", "2(x3", "-1", "a", "1(x99999)"]
)
def test_what_are_no_tasks_per_node(text):
    with pytest.raises(ValueError, match=r"as in 2\(x3\),1\. Received: "):
        expand_tasks_per_node(text)


NODES = {"SLURM_JOB_NODELIST": "n[08-10]"}


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({}, [1, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        # What is said of each node counts before what is said of all.
        ({"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS_PER_NODE": "4"}, [2, 2, 1]),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "12"}, [4, 4, 4]),
        ({"SLURM_NTASKS": "8"}, [3, 3, 2]),
        ({"SLURM_NTASKS": "8", "SLURM_CPUS_ON_NODE": "64"}, [3, 3, 2]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_CPUS_ON_NODE": "16"}, [16, 16, 8]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_CPUS_PER_TASK": "4"}, [4, 4, 2]),
        ({"SLURM_CPUS_ON_NODE": "6", "SLURM_CPUS_PER_TASK": "4"}, [1, 1, 1]),
        ({"SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "4"}, [1, 1, 1]),
        ({"SLURM_CPUS_ON_NODE": "6"}, [6, 6, 6]),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS": ""}, [1, 1, 1]),
        ({"SLURM_HET_SIZE": "1"}, [1, 1, 1]),
    ],
)
def test_the_hosts_of_an_allocation(variables, slots):
    hosts = allocated_hosts(NODES | variables)
    assert hosts == [Host(f"n{n:02d}", slots[n - 8]) for n in (8, 9, 10)]


def test_a_node_without_a_task_is_no_host():
    assert allocated_hosts(NODES | {"SLURM_NTASKS": "2"}) == [Host("n08", 1), Host("n09", 1)]


def test_the_older_name_of_the_list():
    assert allocated_hosts({"SLURM_NODELIST": "a,b"}) == [Host("a", 1), Host("b", 1)]
    both = {"SLURM_NODELIST": "a", "SLURM_JOB_NODELIST": "b"}
    assert allocated_hosts(both) == [Host("b", 1)]


def test_the_environment_of_this_process(monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not in_allocation()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "3(x2)")
    assert in_allocation()
    assert allocated_hosts() == [Host("n1", 3), Host("n2", 3)]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_JOB_NODELIST": ""}, ("not a Slurm job", "-H host1:2")),
        (
            {"SLURM_JOB_NODELIST": "n[1-"},
            ("SLURM_JOB_NODELIST is not valid: ", "'n[1-'", "do not match"),
        ),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, ("2(x2)", "2 entries", "list of 3", "-H host1:2")),
        ({"SLURM_TASKS_PER_NODE": "two"}, ("SLURM_TASKS_PER_NODE is not valid: ", "'two'")),
        ({"SLURM_JOB_CPUS_PER_NODE": "8"}, ("SLURM_JOB_CPUS_PER_NODE=8", "1 entries", "list of 3")),
        ({"SLURM_NTASKS_PER_NODE": "0"}, ("SLURM_NTASKS_PER_NODE", "positive", "'0'")),
        ({"SLURM_NTASKS": "many"}, ("SLURM_NTASKS", "positive", "'many'")),
        ({"SLURM_HET_SIZE": "2"}, ("Heterogeneous", "SLURM_HET_SIZE=2", "-H host1:2")),
    ],
)
def test_what_is_wrong_with_an_allocation(variables, words):
    with pytest.raises(UsageError) as refused:
        allocated_hosts(NODES | variables)
    for word in words:
        assert word in str(refused.value)
