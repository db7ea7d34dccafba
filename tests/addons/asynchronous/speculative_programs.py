"""What one process does for the tests of speculative backups: three workers' calls of two servers."""

from __future__ import annotations

__all__ = ["calls_of_servers"]


def calls_of_servers() -> dict:
    """Calls of two workers and a backup in an order by hand, and what the servers made of them."""
    import keras
    import numpy as np

    from tfdist.addons.asynchronous.cluster import local_cluster
    from tfdist.addons.asynchronous.connection import ServerConnection
    from tfdist.addons.asynchronous.hosted_model import HostedModel

    cluster, servers = local_cluster(2)
    assert len(servers) == 2
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.optimizer.build(model.trainable_variables)
    workers = [
        HostedModel(
            [ServerConnection(k, address, 60.0) for k, address in enumerate(cluster.servers)],
            0,
            model,
            [],
            (worker, 3),
            0.0,
            quorum=2,
            speculative=True,
        )
        for worker in range(3)
    ]
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    workers[0].publish()
    before, _ = workers[0].pull(range(len(shapes)))

    def send(worker: int, step: int, shard: int, value: float) -> list[int]:
        grads: dict = {i: (np.full(shape, value, np.float32),) for i, shape in enumerate(shapes)}
        kinds = ["dense"] * len(shapes)
        then = [step] * len(cluster.servers)
        nothing_more: tuple[list, list, list] = ([], [], [])
        rate = np.array(1.0, np.float32)
        return workers[worker].push(kinds, grads, {}, rate, nothing_more, then, shard)[0]

    # Step 0: worker 0, then the backup for worker 0 (too late), then for worker 1, which is late itself.
    # Step 1: the backup for worker 1, worker 1 (too late), worker 0. Step 2: worker 1 alone.
    sent = [
        send(0, 0, 0, 1.0),
        send(2, 0, 0, 100.0),
        send(2, 0, 1, 3.0),
        send(1, 0, 1, 100.0),
        send(2, 1, 1, 5.0),
        send(1, 1, 1, 100.0),
        send(0, 1, 0, 7.0),
        send(1, 2, 1, 100.0),
    ]
    missing = workers[2].missing()
    after, versions = workers[2].pull(range(len(shapes)))
    found = {
        "sent": sent,
        "versions": versions,
        "steps": [float(x) for i in before for x in (before[i] - after[i]).flat],
        "updates": workers[0].updates().tolist(),
        "dropped": workers[0].dropped().tolist(),
        "redone": workers[0].redone().tolist(),
        "missing": [each.missing.tolist() for each in missing],
        "slowness": [each.slowness.tolist() for each in missing],
    }
    # Worker 1 takes back what waits, worker 0 has nothing there.
    for worker in (0, 1):
        workers[worker].withdraw([2, 2])
    found["withdrawn"] = [workers[0].updates().tolist(), workers[0].dropped().tolist()]
    for hosted in workers:
        for part in hosted.parts:
            part._connection.close()
    return found
