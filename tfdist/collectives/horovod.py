"""Horovod as an engine: raw operations on static process sets.

Nothing of Horovod's Keras or optimizer wrappers is used: they do not know Keras 3.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import types

import psutil
import tensorflow as tf

from tfdist.backend.native import TRANSPORT
from tfdist.collectives.engine import Engine, reduce_locally, split_rows
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.collectives.group import Group
from tfdist.collectives.p2p import P2PEngine, with_p2p
from tfdist.collectives.rank_sets import rank_sets
from tfdist.mesh import Mesh
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.schedulers import join, started_by_scheduler
from tfdist.utils import checks
from tfdist.utils.untested import say_untested

_logger = logging.getLogger("tfdist")

#: How often Horovod looks for work, in ms, unless the user says. At its own 1 ms the looking
#: takes up to a fifth of a core that also computes.
_CYCLE_MS = 2.5
#: Where latency-critical operations go peer to peer, and only gradients are left to look for.
_CYCLE_MS_FOR_GRADIENTS = 5.0
#: Where all operations go peer to peer.
_CYCLE_MS_AT_REST = 25.0


def _cycle_ms(size: int, has_p2p: bool) -> float:
    """How often Horovod is to look for work in a world of `size` ranks, in ms."""
    if not has_p2p:
        return _CYCLE_MS
    return _CYCLE_MS_AT_REST if size <= P2PEngine.most_members else _CYCLE_MS_FOR_GRADIENTS


def start(mesh: Mesh | None = None, *, deterministic: bool = False) -> Engine:
    """Horovod, with peer-to-peer messages beside it where these are possible.

    Args:
        mesh: The mesh; resolved here, against Horovod's world.
        deterministic: As in `HorovodEngine`.
    """
    expects_p2p = TRANSPORT.find() is not None and not tf.config.list_physical_devices("GPU")
    engine = HorovodEngine(mesh, deterministic=deterministic, has_p2p=expects_p2p)
    found = with_p2p(engine)
    if expects_p2p and found is engine and engine.size > 1:
        _logger.warning(
            "Horovod looks for work every %s ms, which suits ranks with peer-to-peer messages. For "
            "these set HOROVOD_CYCLE_TIME=%s.",
            os.environ.get("HOROVOD_CYCLE_TIME"),
            _CYCLE_MS,
        )
    return found


def import_horovod() -> types.ModuleType:
    """Returns `horovod.tensorflow`.

    Raises:
        ImportError: Horovod is missing, or was built for another TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            "Horovod cannot be imported. Build it for the installed TensorFlow with "
            f"`tfdist-install-horovod`, or use MultiWorkerStrategy. The import said: {error}"
        ) from error
    return hvd


class HorovodEngine(Engine):
    """Horovod's Gloo, MPI or NCCL operations.

    Process sets are made once, when Horovod starts: sets that are added later cost a round of
    agreement at every use of Horovod. So `send` and `recv` reach ranks along the axes named in
    `pairs_along`, and the other rank of any group of two.

    Args:
        mesh: The mesh; resolved here, against Horovod's world.
        pairs_along: Mesh axes along which any two ranks may send to each other; `mesh.message_axes` by
            default.
        deterministic: Whether each tensor is added up by itself. Horovod fuses those that come
            together into one buffer, and where in it a number lies decides which rank's comes
            first in its sum.
        has_p2p: Whether latency-critical operations will go peer to peer, so that Horovod can rest
            for longer between two looks for work.
    """

    name = "horovod"
    reduce_as = {tf.bfloat16: tf.float32, tf.uint16: tf.int32, tf.int16: tf.int32}
    move_as = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}

    def __init__(
        self,
        mesh: Mesh | None = None,
        pairs_along: tuple[str, ...] | None = None,
        deterministic: bool = False,
        has_p2p: bool = False,
    ):
        checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
        self.is_deterministic = checks.boolean("deterministic", deterministic)
        self._hvd = hvd = import_horovod()
        mesh = mesh or Mesh()
        scheduled = started_by_scheduler()
        if scheduled and not started_by_horovod() and not hvd.mpi_built():
            join("horovod", scheduled)
        started = started_by_horovod() or (0, 1)
        if scheduled and not started_by_horovod():
            started = scheduled.rank, scheduled.size
        resolved = mesh.resolve(size=started[1], rank=started[0])
        pairs_along = resolved.message_axes if pairs_along is None else pairs_along
        sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in rank_sets(resolved, pairs_along)}
        if hvd.is_initialized():
            raise RuntimeError(
                "Horovod is already running in this process. Make the strategy before anything "
                "else calls hvd.init(): it starts Horovod with the process sets of its mesh."
            )
        # Horovod reads its settings from the environment alone.
        os.environ.setdefault("HOROVOD_CYCLE_TIME", str(_cycle_ms(resolved.size, has_p2p)))
        if deterministic:
            os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        hvd.init(process_sets=list(sets.values()))
        if (hvd.rank(), hvd.size()) != (resolved.rank, resolved.size):
            raise RuntimeError(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, its launcher said rank "
                f"{resolved.rank} of {resolved.size}. Start the ranks with `tfdist-run`."
            )
        if hvd.nccl_built() and tf.config.list_physical_devices("GPU"):
            say_untested("NCCL (in this build of Horovod)")
        self._sets = {tuple(range(resolved.size)): hvd.global_process_set, **sets}
        super().__init__(resolved)

    def all_reduce(self, tensor, group, reduction, name):
        """`hvd.allreduce`."""
        return self._hvd.mpi_ops._allreduce(
            _varying(tensor), op=self._operator(reduction), **self._options(group, name)
        )

    def all_gather(self, tensor, group, name):
        """`hvd.allgather`, which takes sizes as they come."""
        return self._hvd.allgather(_varying(tensor), **self._options(group, name))

    def all_gather_uneven(self, tensor, group, name):
        """`hvd.allgather`."""
        return self.all_gather(tensor, group, name)

    def reduce_scatter(self, tensor, group, reduction, name):
        """`hvd.reducescatter`; for max and min, which it lacks, an exchange and a local reduce."""
        if reduction in ("max", "min"):
            # A name stands for one kind of operation: Horovod's response cache crashes on a name
            # that was a reduce-scatter before.
            received = self.all_to_all(tensor, group, f"{name}/exchange")
            return reduce_locally(split_rows(received, group.size), reduction)
        return self._hvd.mpi_ops._reducescatter(
            _varying(tensor), op=self._operator(reduction), **self._options(group, name)
        )

    def all_to_all(self, tensor, group, name):
        """`hvd.alltoall`."""
        return self._hvd.alltoall(_varying(tensor), **self._options(group, name))

    def all_to_all_uneven(self, tensor, splits, group, name):
        """`hvd.alltoall` with splits."""
        return self._hvd.alltoall(_varying(tensor), splits=splits, **self._options(group, name))

    def broadcast(self, tensor, root, group, name):
        """`hvd.broadcast`, which counts the root in the world."""
        return self._hvd.broadcast(
            _varying(tensor), root_rank=group.ranks[root], **self._options(group, name)
        )

    def host_address(self):
        """The address of the interface that Gloo uses, or of the one that leads to the others."""
        interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return address.address
        if self._hvd.local_size() == self.size:
            return "127.0.0.1"
        return socket.gethostbyname(socket.gethostname())

    def shutdown(self) -> None:
        """Ends Horovod's background thread; collectives of other ranks then fail."""
        super().shutdown()
        self._hvd.shutdown()

    def _check_group(self, ranks):
        self._process_set(ranks)

    def _process_set(self, ranks):
        if ranks not in self._sets:
            raise ValueError(
                f"Horovod has no process set for the ranks {ranks}: sets are made at start-up. "
                f"Make the engine with `pairs_along=` naming the axis. Received: {self.mesh!r}."
            )
        return self._sets[ranks]

    def _operator(self, reduction: str) -> int:
        hvd = self._hvd
        return {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max, "min": hvd.Min}[reduction]

    def _options(self, group: Group, name: str) -> dict:
        # Names are already the same on all ranks; TensorFlow's scopes need not be. Horovod takes
        # what follows the last "/" of a node's name, where it is told to leave scopes out.
        return {
            "name": name.replace("+", "-").replace("/", ">"),
            "ignore_name_scope": True,
            "process_set": self._process_set(group.ranks),
        }


def _varying(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, as one that TensorFlow takes no constant for.

    Horovod's operations do not say that they have an effect: one with a constant input would run
    while the graph is optimized, and on this rank only, if other ranks' inputs are no constants.
    """
    if tf.executing_eagerly():
        return tensor
    # A slice of the whole copies nothing, and where it begins is known to a run alone.
    # A variable made for a graph of TensorFlow 1 would want an initializer to be run.
    zero = _zero() if outermost_is_eager() else tf.cast(tf.timestamp() < 0.0, tf.int32)
    begin = tf.zeros([tensor.shape.rank], tf.int32) + zero
    return tf.ensure_shape(tf.slice(tensor, begin, [-1] * tensor.shape.rank), tensor.shape)


@functools.cache
def _zero() -> tf.Variable:
    """What nothing but a run of the graph can say is zero."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(0, trainable=False, name="zero")
