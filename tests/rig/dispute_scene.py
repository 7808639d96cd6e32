"""A dispute about a version of the small model of court_scene.py, and all members that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from farflung.coordinator.audits.dispute import Dispute, DisputedVersion
from farflung.coordinator.court.questions import Questions
from farflung.protocol.limits import PART_BYTES
from farflung.protocol.messages import Shown, What
from rig.court_scene import FRAGMENT, RULES, TRUTH, Holder, signature_of


class Court:
    """A dispute about a version, and all members that are here.  Time goes on while questions are open."""

    def __init__(self, *members: Holder, settled: Iterable[int] = (0, 1, 2), **case: object) -> None:
        self.members = {member.name: member for member in members}
        self.questions, self.now = Questions(), 0.0
        version = members[0].version
        plain = {
            "fragment": FRAGMENT,
            "version": version,
            "state_bytes": RULES.form.size_bytes,
            "result_bytes_most": RULES.form.part_bytes + 4096,
            "digests": {v: TRUTH.digest(v) for v in settled if v < version},
            "commits": {v: TRUTH.commit(v) for v in range(1, version + 1)},
            "next_state": RULES.after,
            "is_signed": lambda peer, digest, signature: signature == signature_of(peer, digest),
        }
        self.dispute = Dispute(DisputedVersion(**{**plain, **case}), self.questions)  # type: ignore[arg-type]

    @property
    def claims(self) -> dict[bytes, list[str]]:
        claims: dict[bytes, list[str]] = {}
        for member in self.members.values():
            claims.setdefault(member.digest, []).append(member.name)
        return claims

    def sits(self, most_s: float = 300.0, until: Callable[[], bool] = lambda: False) -> float:
        """Until it is over; how long that took."""
        while not self.dispute.step(self.claims, self.now) and not until():
            assert self.now < most_s, "it never ends"
            for name, fields in self.questions.due(set(self.members), self.now):
                self._answer(self.members[name], fields)
            answers = self.questions.take_answers()
            for answer in answers:
                assert self.dispute.on_answer(answer)
            self.now += 0.0 if answers else 1.0
        return self.now

    def _answer(self, member: Holder, fields: dict[str, object]) -> None:
        what, version = What(str(fields["what"])), int(str(fields["version"]))
        member.asked.append(what)
        if member.mute:
            return
        raw = member.shows(what, version, int(str(fields["chunk"]))) or b""
        signature = b""
        if what is What.HASHES and member.signs:
            signature = signature_of(member.name, member.digest)
        number = int(str(fields["question"]))
        for start in range(0, max(1, len(raw)), PART_BYTES):
            part = raw[start : start + PART_BYTES]
            shown = Shown(
                session=bytes(16), seq=1, question=number, start=start, total=len(raw), part=part,
                signature=signature,
            )  # fmt: skip
            self.questions.on_shown(member.name, shown, self.now)
