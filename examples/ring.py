"""A ring all-reduce by send and receive, timed beside the engine's own.

    python examples/ring.py
    tfdist-run -np 2 -- python examples/ring.py

Each rank cuts its tensor into N chunks. In N - 1 rounds it sends a chunk to the right and adds the one that
comes from the left; then each rank has one chunk of the sum. In N - 1 more rounds the sums go round (Patarasuk
and Yuan 2009). A rank sends 2 (N - 1) / N of the tensor, the least that is possible.
"""

import time

import tensorflow as tf

import tfdist
from tfdist.collectives import all_reduce, barrier, recv, send

# Along the pipeline axis any rank can send to its neighbours, whichever the engine.
strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, pipeline=-1))
group = strategy.group("pipeline")
ranks, rank = strategy.mesh.size, strategy.mesh.rank


def exchange(chunk):
    """Sends to the right and returns what comes from the left."""
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2:  # Neighbours take turns, so that not all of them wait to send.
        came = recv(tf.zeros_like(chunk), group, left)
        send(chunk, group, right)
    else:
        send(chunk, group, right)
        came = recv(tf.zeros_like(chunk), group, left)
    return came


def ring_all_reduce(tensor):
    """The sum of the tensors of all ranks, whose number divides their entries."""
    chunks = tf.split(tensor, ranks)
    for step in range(ranks - 1):
        chunks[(rank - step - 1) % ranks] += exchange(chunks[(rank - step) % ranks])
    for step in range(ranks - 1):
        chunks[(rank - step) % ranks] = exchange(chunks[(rank - step + 1) % ranks])
    return tf.concat(chunks, axis=0)


def timed(function, tensor, times=10):
    """The result, and the seconds of the fastest of some calls."""
    function, seconds = tf.function(function), []
    for _ in range(times + 1):  # The first one builds the graph, and does not count.
        barrier(group)
        begin = time.perf_counter()
        result = function(tensor).numpy()
        seconds.append(time.perf_counter() - begin)
    return result, min(seconds[1:])


mib = 8
entries = (mib << 18) // ranks * ranks
tensor = tf.random.stateless_uniform([entries], seed=[rank, 0]) / ranks
ours, ring_seconds = timed(ring_all_reduce, tensor)
theirs, engine_seconds = timed(lambda x: all_reduce(x, group), tensor)
if strategy.is_chief:
    print(f"{mib} MiB: ring {ring_seconds * 1e3:.1f} ms, engine {engine_seconds * 1e3:.1f} ms.")
    off = abs(ours - theirs).max()
    print(f"Mean {ours.mean():.3f}, off by {off:.4f} at most, on {ranks} rank(s).")
