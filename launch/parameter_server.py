"""What `tfdist-run --ps` starts: a parameter server of TF_CONFIG, until its workers have ended."""

from __future__ import annotations

import os
import sys

from tfdist.launch.command import say
from tfdist.launch.flag_values import YEAR
from tfdist.runtime.exit_codes import FAILED, USAGE

_STARTUP_SECONDS = 600.0
#: `tfdist-run` ends servers when no rank runs. How long a worker may be silent is for the workers to say.
_SILENT_SECONDS = YEAR


def run() -> None:
    """Serves, and exits: with one line where it cannot."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Parameters are in the host's memory.
    from tfdist.addons.asynchronous import ParameterServerError
    from tfdist.addons.asynchronous.cluster import cluster_from_environment
    from tfdist.addons.asynchronous.serving import serve

    try:
        cluster = cluster_from_environment()
        if cluster is None or cluster.job != "ps":
            raise ValueError(
                "A parameter server is a `ps` task of TF_CONFIG: `tfdist-run --ps=1` sets it."
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
