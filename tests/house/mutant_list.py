"""Rules of the protocol, each with one line that breaks it: what tests/house/mutants.py changes, one at a time.

The text of a rule stands exactly once in its file (tests/house/test_mutants.py looks), so that these lists do not rot:
who rewrites a rule writes its mutant anew.  The tests of each are those that are closest to it.
"""

from __future__ import annotations

from mutant import Mutant
from mutants_of_batches import BATCHES
from mutants_of_evaluation import EVALUATION
from mutants_of_finding import FINDING
from mutants_of_foresight import FORESIGHT
from mutants_of_helpers import HELPERS
from mutants_of_islands import ISLANDS
from mutants_of_joiners import JOINERS
from mutants_of_keeping import KEEPING
from mutants_of_laboratory import LABORATORY
from mutants_of_lines import LINES
from mutants_of_meshes import MESHES
from mutants_of_pace import PACE
from mutants_of_peers import ARITHMETIC, SHARDS, STAGES, STATE
from mutants_of_proofs import ERAS, PROOFS, SUMS
from mutants_of_reach import REACH
from mutants_of_rounds import CROSSINGS, DOOR, FRAMES, ROUNDS, SLOW_LINES
from mutants_of_runs import RUN
from mutants_of_seats import SEATS
from mutants_of_sparse import SPARSE
from mutants_of_stages import PIPELINES
from mutants_of_standby import STANDBY

MUTANTS: tuple[Mutant, ...] = (
    *FRAMES,
    *SLOW_LINES,
    *DOOR,
    *LINES,
    *ROUNDS,
    *FORESIGHT,
    *CROSSINGS,
    *RUN,
    *PIPELINES,
    *BATCHES,
    *SEATS,
    *ARITHMETIC,
    *STATE,
    *JOINERS,
    *STAGES,
    *SHARDS,
    *ISLANDS,
    *PROOFS,
    *SUMS,
    *ERAS,
    *REACH,
    *HELPERS,
    *FINDING,
    *STANDBY,
    *KEEPING,
    *MESHES,
    *EVALUATION,
    *PACE,
    *SPARSE,
    *LABORATORY,
)
