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
FRONT_DOOR = ("tests/coordinator/door/test_front_door.py", "tests/coordinator/admission/test_admission.py")
ADMISSION = (
    "tests/coordinator/admission/test_admission.py",
    "tests/coordinator/admission/test_invitations.py",
)
ROUND = (
    "tests/coordinator/rounds/test_round.py",
    "tests/coordinator/run/test_round_driver.py",
    "tests/coordinator/run/test_machine.py",
)
WITHHOLDING = (
    "tests/coordinator/rounds/test_silent_owners.py",
    "tests/coordinator/rounds/test_round.py",
    "tests/whole/test_liars.py",
)
STEADINESS = ("tests/coordinator/rounds/test_steadiness.py", "tests/coordinator/run/test_round_driver.py")
WEIGHTS = ("tests/coordinator/rounds/test_outliers.py", "tests/coordinator/rounds/test_round.py")
CONDUCTOR = (
    "tests/coordinator/run/test_round_driver.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_hostile_members.py",
)
GUIDANCE = ("tests/coordinator/run/test_ticks.py", "tests/coordinator/run/test_machine.py")
LEASES = (
    "tests/coordinator/ledger/test_leases.py",
    "tests/coordinator/run/test_lease_desk.py",
    "tests/coordinator/run/test_round_driver.py",
    "tests/whole/test_churn.py",
)
JOURNAL = (
    "tests/coordinator/test_durability.py",
    "tests/coordinator/ledger/test_journal.py",
    "tests/coordinator/ledger/test_journal_kept.py",
)
GOING_BACK = ("tests/coordinator/recovery/test_rollback.py", "tests/whole/test_going_back.py")
MEMBER = (
    "tests/collectives/test_member.py",
    "tests/peer/machine/test_replica.py",
    "tests/whole/test_hostile_members.py",
)
FEEDBACK = ("tests/compression/test_feedback.py", "tests/whole/test_fragments.py")
FELLOWS = ("tests/checkpoints/test_swarm.py",)
CATCH_UP = ("tests/checkpoints/test_state_sync.py", "tests/whole/test_joining_live.py")
STORE = ("tests/checkpoints/test_store.py",)
LANE = (
    "tests/peer/machine/test_replica.py",
    "tests/peer/machine/test_trainer_sync.py",
    "tests/whole/test_fragments.py",
)
TRAINER = ("tests/peer/machine/test_trainer_proxy.py", "tests/peer/machine/test_trainer_sync.py")
COURT = (
    "tests/coordinator/court/test_holding_proof.py",
    "tests/coordinator/audits/test_dispute.py",
    "tests/coordinator/audits/test_digest_judge.py",
    "tests/coordinator/run/test_digest_agreement.py",
    "tests/coordinator/run/test_ticks.py",
    "tests/coordinator/run/test_round_driver.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_liars.py",
)
DATA = ("tests/coordinator/run/test_lease_desk.py", "tests/whole/test_liars_about_work.py")
AUDITS = ("tests/coordinator/audits/test_auditing.py", "tests/whole/test_wrong_sums.py")
PROVEN = ("tests/coordinator/audits/test_proofs.py",)
WITNESS = ("tests/coordinator/run/test_round_driver.py", "tests/coordinator/run/test_signed_results.py")
AUDITOR = ("tests/peer/audits/test_auditing.py",)
OLDER_ERAS = (
    "tests/coordinator/recovery/test_older_eras.py",
    "tests/coordinator/recovery/test_rollback.py",
    "tests/coordinator/recovery/test_going_back_orders.py",
    "tests/whole/test_going_back.py",
)
UNDONE = (
    "tests/coordinator/recovery/test_going_back_orders.py",
    "tests/coordinator/recovery/test_rollback.py",
)
FLOW = ("tests/collectives/pipeline/test_stage_scheduler.py", "tests/collectives/pipeline/test_flow_world.py")
