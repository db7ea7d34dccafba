"""One parameter server, as a worker sees it: a session with TensorFlow's server over gRPC.

TensorFlow has two ways for independent clients to share variables of a `ps` task: eager contexts
that connect to it (`tf.config.experimental_connect_to_cluster`) and sessions. Resources of one name
are the same for all clients in both. Sessions are taken because all reads of a step travel in one
call, because each call has a time-out of its own, because a client that dies leaves nothing behind
on the server, and because a new session reaches a server that was started anew; an eager context can
be made once, before the first operation, and is lost with the first server that ends.

Each server gets a session of its own, with itself as the master and with a filter that hides the
other servers: nothing travels by way of another server, and none waits for one that is down.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.patience import PatientCaller, ServerEndedError

#: Prefix of the names of all resources on the servers.
_PREFIX = "tfdist"


class ServerConnection:
    """A graph and a session of one server.

    Args:
        index: The server's number.
        address: Its "host:port".
        timeout_seconds: How long one call may take.
    """

    def __init__(self, index: int, address: str, timeout_seconds: float):
        self.index, self.address = index, address
        self._seconds = timeout_seconds
        self._caller = PatientCaller(address)
        self._graph = tf.Graph()
        self._lock = threading.Lock()
        self._session: tf.compat.v1.Session | None = None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, operations become part of the graph, and run on the server."""
        with self._lock, self._graph.as_default(), tf.device(self.device):
            yield

    @property
    def device(self) -> str:
        """The server's device."""
        return f"/job:ps/replica:0/task:{self.index}/device:CPU:0"

    def variable(self, name: str, dtype, shape) -> tf.Tensor:
        """The handle of a variable on the server; one name is one variable for all clients."""
        return tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=shape, container="", shared_name=f"{_PREFIX}/{name}"
        )

    def function(
        self, fetches: Sequence[tf.Tensor | tf.Operation], feeds: Sequence[tf.Tensor]
    ) -> Callable[..., list[np.ndarray]]:
        """What runs a part of the graph on the server: takes the values of `feeds`.

        The fetches that are tensors are what it returns.

        Raises:
            ParameterServerError: When called: the server has ended or does not answer.
        """
        made: list = []
        tensors = [place for place, fetch in enumerate(fetches) if tf.is_tensor(fetch)]

        def call(*values):
            with self.telling():
                if not made:
                    with self._lock:
                        made.append(self._open().make_callable(list(fetches), list(feeds)))
                fetched = self._caller.call(lambda: made[0](*values))
            return [fetched[place] for place in tensors]

        return call

    def _open(self) -> tf.compat.v1.Session:
        if self._session is None:
            config = tf.compat.v1.ConfigProto(
                device_filters=[f"/job:ps/task:{self.index}"],
                operation_timeout_in_ms=int(self._seconds * 1000),
            )
            self._caller.wait_until_listening(self._seconds)
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            self._session = tf.compat.v1.Session(
                f"grpc://{self.address}", graph=self._graph, config=config
            )
        return self._session

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, errors of the connection name the server."""
        try:
            yield
        except (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
            ServerEndedError,
        ) as error:
            raise ParameterServerError(
                f"Parameter server {self.index} at {self.address} has ended or cannot be reached "
                f"({type(error).__name__}). Its parameters are lost: start the job again; a "
                "Checkpointer resumes where it last saved."
            ) from error

    def close(self) -> None:
        """Ends the session; the server keeps its variables."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
        # To close it waits for the server, as would its end: it is to have none.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        with contextlib.suppress(ServerEndedError):
            self._caller.call(session.close)
