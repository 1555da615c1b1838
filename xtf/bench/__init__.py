"""``xtf bench``: a training step timed beside its peers, on the same weights and tokens, in one run.

* `xtf.bench.workload.Workload` says what is computed: a model's config, documents, a dtype.
* a *contender* (`xtf.bench.contenders`) computes its training step: xtf in any form, or another library.
* each contender runs in a process of its own (`xtf.bench.worker`), so that its peak of memory is its own; the processes stay up and
  take a step in turn, round by round (`xtf.bench.rounds`): what else the machine does meets all of them.
* `xtf.bench.report` makes a table, JSON and a picture of the results.

Every contender begins with the same weights (a Hugging Face checkpoint that xtf writes) and must have the same first loss.
"""

from xtf.bench.rounds import Result, Results, run_rounds
from xtf.bench.workload import Workload

__all__ = ["Result", "Results", "Workload", "run_rounds"]
