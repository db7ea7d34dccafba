"""At which addresses a job listens, where its ranks know each other by one that is not the loopback's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import psutil
import pytest

from tests.conftest import skip_without
from tfdist.runtime.rendezvous import Endpoint, environments

RANK = """
import sys
import tfdist, tensorflow as tf
kind = {"horovod": "HorovodStrategy", "tensorflow": "MultiWorkerStrategy"}[sys.argv[1]]
strategy = getattr(tfdist.strategies, kind)(watchdog_seconds=60.0)
group = strategy.group()
total = tfdist.collectives.all_reduce(tf.constant(10.0 ** group.rank), group, name="total")
print("sum", int(total), flush=True)
sys.stdin.readline()
"""


def own_address() -> tuple[str, str]:
    """An address of this machine that is not the loopback's, and its interface."""
    for interface, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address, interface
    pytest.skip("this machine has no address but the loopback's")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_ports_are_open_at_the_address_in_use_alone(engine):
    skip_without(engine)
    address, interface = own_address()
    endpoint = Endpoint(address=address, rendezvous_address=address, interface=interface)
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(environments(engine, [endpoint, endpoint]))
        jobs = []
        for environment in found:
            job = subprocess.Popen(
                [sys.executable, "-c", RANK, engine],
                env={**os.environ, **environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(job.wait)
            stack.callback(job.kill)
            jobs.append(job)
        for job in jobs:
            assert job.stdout.readline() == "sum 11\n"
        ports = {
            connection.laddr.port
            for process in [psutil.Process(), *(psutil.Process(job.pid) for job in jobs)]
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) >= 2  # The heartbeats; the rendezvous, or two servers.
        for port in ports:
            with socket.create_connection((address, port), timeout=5.0):
                pass
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
                pass
        for job in jobs:
            job.stdin.close()  # Both at once: the first rank stays for the other.
        assert [job.wait(60) for job in jobs] == [0, 0]
