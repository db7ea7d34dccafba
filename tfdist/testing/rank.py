"""What a rank of a `RankPool` does: receive a function, run it, answer."""

from __future__ import annotations

import contextlib
import faulthandler
import http
import importlib
import os
import random
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
from multiprocessing import connection

import cloudpickle

from tfdist import checks
from tfdist.rendezvous import local_environments

__all__ = ["engine", "strategy"]

_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_MEETING_SECONDS = 60.0

#: The meeting points that this rank holds open for the others, as long as it lives: a rank may still
#: be taking its leave of one when the next opens.
_opened = contextlib.ExitStack()
_state: dict = {"engine_name": "local", "engines": {}, "strategies": {}}


def engine(mesh=None):
    """The engine of this rank for a mesh, made at the first call.

    Horovod runs one set of groups at a time, so another mesh restarts it.
    """
    from tfdist.mesh import Mesh

    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    mesh = mesh or Mesh()
    engines = _state["engines"]
    if mesh not in engines:
        name = _state["engine_name"]
        module = importlib.import_module(f"tfdist.collectives.{name}")
        kind = getattr(
            module,
            {"horovod": "HorovodEngine", "tensorflow": "TensorFlowEngine"}.get(name, "LocalEngine"),
        )
        if name == "horovod":
            for old in engines.values():
                old.shutdown()
            if engines:
                _meet_anew()
            engines.clear()
        engines[mesh] = kind(mesh)
    return engines[mesh]


def _meet_anew() -> None:
    """Has Horovod start again at another meeting point, which the first rank opens.

    The one before still has addresses from before: ranks that start again at it now and then
    connect to where nobody listens any more.
    """
    rank, size = (int(os.environ[f"HOROVOD_{what}"]) for what in ("RANK", "SIZE"))
    if "meeting point" not in _state:
        _state["meeting point"] = os.environ[_PORT], 0
    first, number = _state["meeting point"]
    _state["meeting point"] = first, number + 1
    url = f"http://127.0.0.1:{first}/tfdist/{number}"
    if rank == 0:
        # Horovod draws the port; what a test draws after it has seeded is to stay the same.
        before = random.getstate()
        os.environ[_PORT] = _opened.enter_context(local_environments("horovod", size))[0][_PORT]
        random.setstate(before)
        request = urllib.request.Request(url, os.environ[_PORT].encode(), method="PUT")
        urllib.request.urlopen(request, timeout=_MEETING_SECONDS).close()
        return
    end = time.monotonic() + _MEETING_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=_MEETING_SECONDS) as answer:
                os.environ[_PORT] = answer.read().decode()
                return
        except urllib.error.HTTPError as error:  # Not there yet.
            if error.code != http.HTTPStatus.NOT_FOUND or time.monotonic() > end:
                raise
        time.sleep(0.01)


def strategy(mesh=None, **kwargs):
    """A strategy over this rank's engine for a mesh; the same one for the same arguments."""
    from tfdist.mesh import Mesh
    from tfdist.strategies import HorovodStrategy, LocalStrategy, MultiWorkerStrategy

    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    mesh = mesh or Mesh()
    kind = {"horovod": HorovodStrategy, "tensorflow": MultiWorkerStrategy, "local": LocalStrategy}
    shared = engine(mesh)
    key = (mesh, repr(sorted(kwargs.items())))
    found = _state["strategies"].get(key)
    if found is None or found.engine is not shared:
        found = kind[_state["engine_name"]](engine=shared, **kwargs)
        _state["strategies"][key] = found
    return found


def serve(address: str, rank: str, engine_name: str, threads: str) -> None:
    """Connects to the pool and runs what it sends until it hangs up."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    key = bytes.fromhex(sys.stdin.readline().strip())
    channel = connection.Client(address, authkey=key)
    channel.send_bytes(rank.encode())

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    tf.config.threading.set_inter_op_parallelism_threads(max(int(threads), 2))
    _state["engine_name"] = engine_name
    if engine_name == "tensorflow":
        # Must come before the first operation of TensorFlow, whatever the tests do first.
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


def _portable(error: Exception) -> Exception:
    """The error itself where it can travel, else one that says the same."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
