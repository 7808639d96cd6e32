"""What a mutant is, and which tests are closest to what: for the lists of mutants (mutant_list.py).

The text of a rule stands exactly once in its file (tests/house/test_mutants.py looks), so that this list does not rot:
who rewrites a rule writes its mutant anew.  The tests of each are those that are closest to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str  # the rule that is broken
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # closest first


# Tests by what they are about; those of whole runs come last, as they take longest.
AMENDMENTS = ("tests/protocol/test_amendments.py",)
WARM_START = ("tests/checkpoints/test_warm_start.py",)
FRONT_DOOR = ("tests/coordinator/door/test_front_door.py", "tests/coordinator/run/test_admission.py")
ADMISSION = ("tests/coordinator/run/test_admission.py", "tests/coordinator/run/test_invitations.py")
ROUND = (
    "tests/coordinator/rounds/test_in_flight.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
)
WITHHOLDING = (
    "tests/coordinator/rounds/test_withholding.py",
    "tests/coordinator/rounds/test_in_flight.py",
    "tests/whole/test_liars.py",
)
STEADINESS = ("tests/coordinator/rounds/test_steadiness.py", "tests/coordinator/run/test_conductor.py")
WEIGHTS = ("tests/coordinator/rounds/test_screening.py", "tests/coordinator/rounds/test_in_flight.py")
CONDUCTOR = (
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_hostile_members.py",
)
GUIDANCE = ("tests/coordinator/run/test_guidance.py", "tests/coordinator/run/test_machine.py")
LEASES = (
    "tests/coordinator/ledger/test_leases.py",
    "tests/coordinator/run/test_lending.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/whole/test_churn.py",
)
JOURNAL = (
    "tests/coordinator/test_durability.py",
    "tests/coordinator/ledger/test_journal.py",
    "tests/coordinator/ledger/test_journal_kept.py",
)
GOING_BACK = ("tests/coordinator/run/test_going_back.py", "tests/whole/test_going_back.py")
MEMBER = (
    "tests/collectives/test_member.py",
    "tests/peer/machine/test_lane.py",
    "tests/whole/test_hostile_members.py",
)
FEEDBACK = ("tests/compression/test_feedback.py", "tests/whole/test_fragments.py")
FELLOWS = ("tests/checkpoints/test_fellows.py",)
CATCH_UP = ("tests/checkpoints/test_catch_up.py", "tests/whole/test_joining_live.py")
STORE = ("tests/checkpoints/test_store.py",)
LANE = (
    "tests/peer/machine/test_lane.py",
    "tests/peer/machine/test_exchange.py",
    "tests/whole/test_fragments.py",
)
TRAINER = ("tests/peer/machine/test_trainer_view.py", "tests/peer/machine/test_exchange.py")
COURT = (
    "tests/coordinator/court/test_possession.py",
    "tests/coordinator/court/test_dispute.py",
    "tests/coordinator/run/test_settling.py",
    "tests/coordinator/run/test_guidance.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_liars.py",
)
DATA = ("tests/coordinator/run/test_lending.py", "tests/whole/test_liars_about_work.py")
AUDITS = ("tests/coordinator/run/test_auditing.py", "tests/whole/test_wrong_sums.py")
PROVEN = ("tests/coordinator/ledger/test_proofs.py",)
WITNESS = ("tests/coordinator/run/test_conductor.py", "tests/coordinator/run/test_witness.py")
AUDITOR = ("tests/peer/machine/test_auditing.py",)
OLDER_ERAS = (
    "tests/coordinator/run/test_older_eras.py",
    "tests/coordinator/run/test_going_back.py",
    "tests/coordinator/run/test_going_back_orders.py",
    "tests/whole/test_going_back.py",
)
UNDONE = ("tests/coordinator/run/test_going_back_orders.py", "tests/coordinator/run/test_going_back.py")
FLOW = ("tests/collectives/flow/test_flow.py", "tests/collectives/flow/test_flow_world.py")
