"""What the ranks of a benchmark's job find in their environment: how they meet, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from benchmarks.comparisons import Job
from tfdist.runtime.rendezvous import Endpoint, environments, free_ports

#: Whether TensorFlow takes oneDNN's kernels, which it leaves out by itself on some processors. A library
#: runs with the settings that make it the fastest, so this one reaches all jobs.
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

#: Ranks that Horovod's thread has looking for work a thousand times a second, 10% of a core each, are
#: held still while they wait. Gloo counts that time, and gives up after 30 s of its own.
RESTLESS = {"horovod": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}}

#: Nothing of the outside is to reach one side alone.
_DROPPED = ("TF_CONFIG", "PYTHONPATH", "NPROC")
_DROPPED_BEGINNINGS = (
    "GLOO_",
    "HOROVOD_",
    "JAX_",
    "KERAS_",
    "MKL_",
    "OMP_",
    "TF_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "XLA_",
)


def outside() -> dict[str, str]:
    """This process's environment without what only some libraries would listen to, but for `ONEDNN`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == ONEDNN or not (name in _DROPPED or name.startswith(_DROPPED_BEGINNINGS))
    }


@contextlib.contextmanager
def variables(job: Job) -> Iterator[list[dict[str, str]]]:
    """Yields the variables of each rank, through which they meet."""
    common = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(job.threads),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
    }
    if job.meeting in ("torch", "jax"):
        port = str(free_ports(1)[0])
    if job.meeting == "jax":
        yield [
            {
                **common,
                "JAX_PLATFORMS": "cpu",
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                # The size of XLA's pool, which else is that of the machine.
                "NPROC": str(job.threads),
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
                "KERAS_DISTRIBUTION_NUM_PROCESSES": str(job.ranks),
                "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
            }
            for rank in range(job.ranks)
        ]
        return
    if job.meeting == "torch":
        yield [
            {
                **common,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "WORLD_SIZE": str(job.ranks),
            }
            for rank in range(job.ranks)
        ]
        return
    with environments(job.meeting, [Endpoint()] * job.ranks) as found:
        more = RESTLESS.get(job.meeting, {})
        yield [{**common, **more, **environment} for environment in found]
