"""The hosts and slots of a Slurm allocation, from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tfdist.launch.flags.command import UsageError
from tfdist.launch.run.hosts import Host
from tfdist.runtime.slurm import MOST_NODES, expand_node_list

_COUNT = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?")
_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with these variables belongs to a Slurm job."""
    return any(environment.get(name) for name in _NODE_LISTS)


def allocated_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The hosts of a Slurm job, in Slurm's order, with a slot for each of their tasks.

    The number of tasks of a host is determined by the first of these variables that is set:
    SLURM_TASKS_PER_NODE, SLURM_NTASKS_PER_NODE, SLURM_NTASKS (distributed evenly),
    SLURM_JOB_CPUS_PER_NODE and SLURM_CPUS_ON_NODE (both divided by SLURM_CPUS_PER_TASK). The default
    is one.

    Raises:
        UsageError: There is no allocation, or a variable is malformed.
    """
    variable = next((name for name in _NODE_LISTS if environment.get(name)), None)
    if variable is None:
        raise UsageError(
            "This is not a Slurm job: SLURM_JOB_NODELIST is not set. Start it under sbatch or "
            "salloc, or name the hosts: -H host1:2,host2:2."
        )
    if _number(environment, "SLURM_HET_SIZE", default=1) > 1:
        raise UsageError(
            "Heterogeneous Slurm jobs are not supported. Received: SLURM_HET_SIZE="
            f"{environment['SLURM_HET_SIZE']}. Name the hosts: -H host1:2,host2:4."
        )
    try:
        nodes = expand_node_list(environment[variable])
    except ValueError as error:
        raise UsageError(f"{variable} is not valid: {error}") from error
    slots = _slots(environment, len(nodes))
    return [Host(node, count) for node, count in zip(nodes, slots, strict=True) if count]


def expand_tasks_per_node(text: str) -> list[int]:
    """Expands the number of tasks on each node: `2(x3),1` is 2, 2, 2 and 1.

    Raises:
        ValueError: The list is malformed.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        found = _COUNT.fullmatch(item)
        if found is None or len(counts) + int(found[2] or 1) > MOST_NODES:
            raise ValueError(
                "Tasks per node must be positive numbers, each with its number of repetitions, as in "
                f"2(x3),1. Received: {text!r}."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _slots(environment: Mapping[str, str], num_nodes: int) -> list[int]:
    """The number of slots of each node."""
    if counts := _counts(environment, "SLURM_TASKS_PER_NODE", num_nodes):
        return counts
    if each := _number(environment, "SLURM_NTASKS_PER_NODE"):
        return [each] * num_nodes
    if total := _number(environment, "SLURM_NTASKS"):
        least, more = divmod(total, num_nodes)
        return [least + 1] * more + [least] * (num_nodes - more)
    cores = _counts(environment, "SLURM_JOB_CPUS_PER_NODE", num_nodes)
    if not cores:
        cores = [_number(environment, "SLURM_CPUS_ON_NODE", default=1)] * num_nodes
    per_task = _number(environment, "SLURM_CPUS_PER_TASK", default=1)
    return [max(1, count // per_task) for count in cores]


def _counts(environment: Mapping[str, str], name: str, num_nodes: int) -> list[int]:
    """A number for each node; empty if the variable is not set."""
    text = environment.get(name)
    if not text:
        return []
    try:
        counts = expand_tasks_per_node(text)
    except ValueError as error:
        raise UsageError(f"{name} is not valid: {error}") from error
    if len(counts) != num_nodes:
        raise UsageError(
            f"{name} must have one entry per node. Received: {name}={text} with {len(counts)} entries, "
            f"and a node list of {num_nodes}. Unset variables set by hand, or name the hosts: "
            "-H host1:2,host2:2."
        )
    return counts


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if re.fullmatch(r"[1-9][0-9]*", text) is None:
        raise UsageError(
            f"{name} must be a positive number. Received: {text!r}. Unset it or correct it."
        )
    return int(text)
