"""Real ranks for tests: run a function on N processes and get what each returned.

```pycon
>>> from tfdist.testing import run_ranks
>>> def rank_and_size():
...     from tfdist.testing import engine
...     return engine().rank, engine().size
>>> run_ranks(rank_and_size, num_ranks=2, engine="tensorflow")
[(0, 2), (1, 2)]
```
"""

from tfdist.testing.faults import FlipBit
from tfdist.testing.pool import RankError, RankPool, run_ranks
from tfdist.testing.rank import engine, strategy

__all__ = ["FlipBit", "RankError", "RankPool", "engine", "run_ranks", "strategy"]
