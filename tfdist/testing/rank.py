"""The program of a rank of a `RankPool`: it receives functions, runs them, and sends the results."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from tfdist.runtime import connect
from tfdist.runtime.rendezvous import Endpoint, environments, free_ports
from tfdist.runtime.shared_gpus import shares_gpus
from tfdist.utils import checks

#: A function of a resolved mesh and an address that returns an Engine. TensorFlow, which an Engine
#: needs, is imported only by the ranks.
MakeEngine = Callable[[Any, str], Any]

#: The purpose of connections from a rank to its pool.
PURPOSE = "pool of ranks"
_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_CONNECT_SECONDS = 60.0

#: The rendezvous servers that this rank keeps open for the others, as long as it lives: a rank may still
#: be disconnecting from one when the next opens.
_opened = contextlib.ExitStack()
_state: dict = {"engine_name": "local", "engines": {}, "strategies": {}}


def engine(mesh=None):
    """The engine of this rank for a mesh, created at the first call.

    Horovod supports one set of groups at a time, so another mesh restarts it.
    """
    from tfdist.mesh import Mesh

    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    mesh = mesh or Mesh()
    engines = _state["engines"]
    if mesh not in engines and "make" in _state:
        engines[mesh] = _make_engine(mesh)
    elif mesh not in engines:
        name = _state["engine_name"]
        module = importlib.import_module(f"tfdist.collectives.{name}")
        make = getattr(
            module, {"horovod": "start", "tensorflow": "TensorFlowEngine"}.get(name, "LocalEngine")
        )
        if name == "horovod":
            for old in engines.values():
                port = _open_another_rendezvous(old)
                old.shutdown()
                os.environ[_PORT] = port
            engines.clear()
        engines[mesh] = make(mesh)
    return engines[mesh]


def make_engines_by(make: MakeEngine, size: int, address: str) -> None:
    """Makes `engine` and `strategy` use engines of a function.

    Args:
        make: The function.
        size: The number of ranks.
        address: The address for the first engine.
    """
    _state.update(make=make, size=size, address=address)


def free_address() -> str:
    """An address of this machine on which no process listens, as "127.0.0.1:PORT"."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def _make_engine(mesh):
    from tfdist.collectives.engine import Engine
    from tfdist.collectives.objects import broadcast_object

    resolved = mesh.resolve(size=_state["size"], rank=_state["rank"])
    address = _state["address"]
    for old in list(_state["engines"].values())[-1:]:
        # On the previous address, the first rank of that engine still listens.
        found = free_address() if old.rank == 0 else None
        address = broadcast_object(found, old.group(), name="testing/address")
    made = _state["make"](resolved, address)
    checks.instance("engine", made, Engine, "a function that returns an Engine")
    if made.mesh != resolved:
        raise ValueError(
            "The engine must have the mesh that was passed to `make_engine`. Received: "
            f"{made.mesh!r} instead of {resolved!r}. Pass the mesh to `Engine.__init__`."
        )
    return made


def _open_another_rendezvous(old) -> str:
    """Opens a rendezvous server on the first rank, for a restart of Horovod; returns its port.

    The previous one still has old addresses: ranks that restart with it occasionally connect to one on
    which no process listens any more. The port is broadcast by the `old` engine.
    """
    from tfdist.collectives.objects import broadcast_object

    port = None
    if old.rank == 0:
        endpoints = [Endpoint()] * old.size
        port = _opened.enter_context(environments("horovod", endpoints))[0][_PORT]
    return broadcast_object(port, old.group(), name="testing/rendezvous")


def strategy(mesh=None, **kwargs):
    """A strategy with this rank's engine for a mesh; the same one for the same arguments."""
    from tfdist.mesh import Mesh
    from tfdist.strategies import HorovodStrategy, LocalStrategy, MultiWorkerStrategy
    from tfdist.strategies.parallel import ParallelStrategy

    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    mesh = mesh or Mesh()
    kind = {"horovod": HorovodStrategy, "tensorflow": MultiWorkerStrategy, "local": LocalStrategy}
    shared = engine(mesh)
    key = (mesh, repr(sorted(kwargs.items())))
    found = _state["strategies"].get(key)
    if found is None or found.engine is not shared:
        make = ParallelStrategy if "make" in _state else kind[_state["engine_name"]]
        found = make(engine=shared, **kwargs)
        _state["strategies"][key] = found
    return found


def serve(address: str, rank: str, engine_name: str, threads: str) -> None:
    """Connects to the pool, and runs the functions that it sends until the connection is closed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    key = bytes.fromhex(sys.stdin.readline().strip())
    sock = connect(address, key, PURPOSE, int(rank), timeout=_CONNECT_SECONDS)
    # Functions and results are pickles of any size, for which Python's class is designed.
    channel = Connection(sock.detach())

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    tf.config.threading.set_inter_op_parallelism_threads(max(int(threads), 2))
    _state.update(engine_name=engine_name, rank=int(rank))
    if shares_gpus():
        from tfdist.strategies.devices import pin_gpu

        pin_gpu()
    if engine_name == "tensorflow":
        # It must precede the first operation of TensorFlow.
        engine()
    while True:
        try:
            function, args, kwargs = cloudpickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = ("result", function(*args, **kwargs))
        except Exception as error:
            answer = ("error", (_portable(error), traceback.format_exc()))
        channel.send_bytes(cloudpickle.dumps(answer))
    if "make" in _state:  # Threads of such an engine may keep the process alive.
        for made in _state["engines"].values():
            made.shutdown()


def _portable(error: Exception) -> Exception:
    """The error if it can be pickled, else a `RuntimeError` with its message."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
