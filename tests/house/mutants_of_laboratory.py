"""Of simulated runs, where time passes as on real lines, and of the audit of real ones."""

from __future__ import annotations

from mutant import Mutant

REPLICA, WORLD = "simulator/laboratory/replica.py", "simulator/laboratory/laboratory.py"
OF_PACKAGES = ("tests/protocol/test_extensions.py",)
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
    Mutant(
        "a step of a package that remembers something is refused",
        "collectives/arithmetic/conformance.py",
        "            other = make()",
        "            other = other",
        OF_PACKAGES,
    ),
    Mutant(
        "a part of a chunk is stepped as it is within the whole",
        "collectives/arithmetic/conformance.py",
        "        third.step(part[0][here], tuple(each[here] for each in part[1:]), d_n[here], version)",
        "        third.step(part[0], tuple(part[1:]), d_n, version)",
        OF_PACKAGES,
    ),
    Mutant(
        "what a package has is tried before it is used",
        "protocol/extensions.py",
        '    if flaw := EntryPoint("", kind.suite, "").load()(made):',
        "    if flaw := None:",
        OF_PACKAGES,
    ),
    Mutant(
        "a codec of a package keeps what it says that it loses",
        "compression/codec.py",
        "    beta: float | None = loaded(CODEC, codec).memory",
        "    beta: float | None = None",
        OF_PACKAGES,
    ),
    Mutant(
        "what auditors could not recompute is not audited",
        "protocol/manifest.py",
        "    if rule not in POLICIES:",
        "    if not rule:",
        OF_PACKAGES,
    ),
    Mutant(
        "what a group adds up is a sum in any case, and a result follows the run's rule",
        "peer/state/outer_state.py",
        "        rule = None if effect.codec else self._rule  # what a group adds up is a sum in any case",
        "        rule = None",
        ("tests/whole/test_own_rules.py",),
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
