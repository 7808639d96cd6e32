"""Of simulated runs, where time passes as on real lines, and of the audit of real ones."""

from __future__ import annotations

from mutant import Mutant

REPLICA, WORLD = "simulator/laboratory/replica.py", "simulator/laboratory/laboratory.py"
OF_RUNS = ("tests/whole/test_laboratory.py",)

LABORATORY = (
    Mutant(
        "a coordinator that was heard all the time is no excuse for a round that a death ended",
        "console/history/audit.py",
        "any(wall(plan) <= at <= wall(end) for at in apart[peer])",
        "bool(apart[peer])",
        ("tests/console/test_audit.py",),
    ),
    Mutant(
        "a replica is woken by what it waits for, and by that alone",
        REPLICA,
        "if self._waits == waits:  # nothing else has woken it",
        "if True:",
        OF_RUNS,
    ),
    Mutant("each replica has random numbers of its own", REPLICA, "torch.manual_seed(seed)", "pass", OF_RUNS),
    Mutant(
        "what was sent before leaves first",
        "simulator/laboratory/places.py",
        "self._free_s = max(self._free_s, now) + size / self.bytes_per_s",
        "self._free_s = now + size / self.bytes_per_s",
        OF_RUNS,
    ),
    Mutant(
        "a killed peer comes back",
        WORLD,
        "self._at(comes_s, self._bring_back, number)",
        "self._to_come -= 1",
        OF_RUNS,
    ),
    Mutant(
        "what is under way is not asked for again",
        WORLD,
        "peer.member.on_lines(set(), arriving, self.now)",
        "peer.member.on_lines(set(), set(), self.now)",
        OF_RUNS,
    ),
)
