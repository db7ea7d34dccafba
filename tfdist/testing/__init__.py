"""Real ranks for tests: runs a function in N processes and returns their results.

```pycon
>>> from tfdist.testing import run_ranks
>>> def rank_and_size():
...     from tfdist.testing import engine
...     return engine().rank, engine().size
>>> run_ranks(rank_and_size, num_ranks=2, engine="tensorflow")
[(0, 2), (1, 2)]
```
"""

from typing import TYPE_CHECKING

from tfdist.testing.pool import RankError, RankPool, run_ranks
from tfdist.testing.rank import engine, strategy
from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:  # For editors and the reference; at run time `__getattr__` imports them.
    from tfdist.testing.engines import check_engine as check_engine

#: They need TensorFlow, without which a pool of ranks is started.
_HOMES = {"check_engine": "tfdist.testing.engines"}

__all__ = ["RankError", "RankPool", "engine", "run_ranks", "strategy", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES, ["faults"])
