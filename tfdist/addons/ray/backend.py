"""The workers of Ray Train as ranks, with the variables that torchrun sets."""

from __future__ import annotations

import collections
import dataclasses
import os
import secrets
from typing import Any

import ray
import ray.util
from ray.train.backend import Backend, BackendConfig
from ray.train.tensorflow import TensorflowConfig

from tfdist.runtime.job_key import JOB_TOKEN
from tfdist.runtime.rendezvous import free_ports


@dataclasses.dataclass
class TfdistConfig(TensorflowConfig):
    """The configuration of `TensorflowTrainer` that makes Ray's workers the ranks of tfdist.

    A strategy made in the training function then has all workers as ranks, on the engine of its class:

    ```python
    ray.train.tensorflow.TensorflowTrainer(
        train_function,
        tensorflow_config=tfdist.addons.ray.TfdistConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=4),
    )
    ```

    A restart of the workers, also with another number of them, is a new start of all ranks: they continue from
    the checkpoints of a `Checkpointer` in a directory that all of them reach.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray calls when workers start."""
        return _Backend


class _Backend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Gives each worker its rank, and all the address of the first."""
        hosts = worker_group.execute(ray.util.get_node_ip_address)
        (port,) = worker_group.execute_single(0, free_ports, 1)
        common = {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": str(port),
            JOB_TOKEN: secrets.token_hex(16),
        }
        sizes = collections.Counter(hosts)
        before: collections.Counter = collections.Counter()
        waiting = []
        for rank, host in enumerate(hosts):
            local = {"LOCAL_RANK": str(before[host]), "LOCAL_WORLD_SIZE": str(sizes[host])}
            before[host] += 1
            variables = {"RANK": str(rank), **local, **common}
            waiting.append(worker_group.execute_single_async(rank, _set, variables))
        ray.get(waiting)


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
