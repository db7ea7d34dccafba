"""The process of `tfdist-run --ps`: a parameter server of TF_CONFIG that ends with its workers."""

from __future__ import annotations

import os
import sys

from tfdist.launch.flags.command import say
from tfdist.launch.flags.values import YEAR
from tfdist.runtime.exit_codes import FAILED, USAGE

_STARTUP_SECONDS = 600.0
#: `tfdist-run` ends servers when no rank runs, so servers do not detect silent workers.
_SILENT_SECONDS = YEAR


def run() -> None:
    """Serve and exit, with a one-line error if that fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Parameters are in the host's memory.
    from tfdist.addons.asynchronous import ParameterServerError
    from tfdist.addons.asynchronous.cluster import cluster_from_environment
    from tfdist.addons.asynchronous.serving import serve

    try:
        cluster = cluster_from_environment()
        if cluster is None or cluster.job != "ps":
            raise ValueError(
                "A parameter server requires a `ps` task in TF_CONFIG. Start it by `tfdist-run --ps=1`."
            )
        serve(cluster, _STARTUP_SECONDS, _SILENT_SECONDS)
    except ValueError as error:
        say("tfdist-run", str(error))
        sys.exit(USAGE)
    except ParameterServerError as error:
        say("tfdist-run", str(error))
        sys.exit(FAILED)


if __name__ == "__main__":
    run()
