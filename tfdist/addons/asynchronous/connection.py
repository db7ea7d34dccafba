"""A worker's connection to one parameter server: a session with TensorFlow's server over gRPC.

TensorFlow has two ways for independent clients to share variables of a `ps` task: eager contexts
that connect to it (`tf.config.experimental_connect_to_cluster`) and sessions. In both, resources with
the same name are shared by all clients. Sessions are used because one call performs all reads of a
step, because each call has its own time-out, because a client that dies leaves nothing behind on the
server, and because a new session can reach a server that was restarted. An eager context can be created
only once, before the first operation, and is lost with the first server that ends.

Each server has a separate session, with that server as the master and with a filter that hides the
other servers: nothing is sent through another server, and no session waits for one that is down.
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
        index: The server's index.
        address: Its "host:port".
        timeout_seconds: The time-out of one call.
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
        """Adds the operations of its context to the graph; they run on the server."""
        with self._lock, self._graph.as_default(), tf.device(self.device):
            yield

    @property
    def device(self) -> str:
        """The server's device."""
        return f"/job:ps/replica:0/task:{self.index}/device:CPU:0"

    def variable(self, name: str, dtype, shape) -> tf.Tensor:
        """The handle of a variable on the server; all clients share the variable of one name."""
        return tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=shape, container="", shared_name=f"{_PREFIX}/{name}"
        )

    def function(
        self, fetches: Sequence[tf.Tensor | tf.Operation], feeds: Sequence[tf.Tensor]
    ) -> Callable[..., list[np.ndarray]]:
        """A function that runs a part of the graph on the server.

        Args:
            fetches: The tensors and operations to compute.
            feeds: The placeholders whose values are its arguments.

        Returns:
            The function. It returns the values of those fetches that are tensors.

        Raises:
            ParameterServerError: When called: the server has ended or does not respond.
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
        """Converts connection errors in its context to an error that names the server."""
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
                f"({type(error).__name__}). Its parameters are lost. Restart the job; a "
                "Checkpointer resumes from its last save."
            ) from error

    def close(self) -> None:
        """Ends the session; the server keeps its variables."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
        # Closing and deleting a session wait for the server, so the session is never deleted.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        with contextlib.suppress(ServerEndedError):
            self._caller.call(session.close)
