"""Questions to members whose words are to be proven: asked in parts, asked again, given up.  Pure.

Used by the run machine's judges (digests, sums), which say what they want of whom and read whole answers.  A question
is one `Show`; its answer comes as `Shown` parts in order, at most so many at once, and the rest is asked for.  Whoever
shows nothing new for `PATIENCE_S` while it is here has no answer.  What the bytes mean, and whether they are true, is
the asker's business: a length over the one that was allowed is no answer, and no memory is taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.protocol.digests import HASH_BYTES, drawn_chunk, hash_bytes, keyed_hash, root_of, split_hashes
from farflung.protocol.limits import PART_BYTES, PARTS_AT_ONCE
from farflung.protocol.messages import TAG_BYTES, Shown, What
from farflung.protocol.model_schema import Fragment

ASK_AGAIN_S = 2.0
PATIENCE_S = 20.0  # without a new part; on a line that carries 6 KB/s a part comes in time


@dataclass(frozen=True)
class WantedProof:
    """One thing that a member may hold."""

    what: What
    fragment: int
    version: int
    chunk: int
    most_bytes: int  # a longer one is not it
    round_no: int = 0
    peer: str = ""  # whose contribution


@dataclass(frozen=True)
class MemberAnswer:
    """`raw` is None where the member has none, or does not answer."""

    number: int
    of: str  # which member showed it
    wanted: WantedProof
    raw: bytes | None
    signature: bytes = b""
    why_none: str = ""
    silent: bool = False  # it said nothing, not even that it has none
    begun: bool = False  # some of it was shown


@dataclass
class _OpenQuestion:
    of: str
    wanted: WantedProof
    parts: bytearray = field(default_factory=bytearray)
    signature: bytes = b""
    asked_at: float | None = None
    asked_from: int = 0
    news_at: float = 0.0


class Questions:
    def __init__(self) -> None:
        self._open: dict[int, _OpenQuestion] = {}
        self._answers: list[MemberAnswer] = []
        self._number = 0

    def ask(self, of: str, wanted: WantedProof, now: float) -> int:
        """The same question of the same member is asked once: its number is the one that it has."""
        for number, each in self._open.items():
            if (each.of, each.wanted) == (of, wanted):
                return number
        self._number += 1
        self._open[self._number] = _OpenQuestion(of, wanted, news_at=now)
        return self._number

    def drop(self, number: int) -> None:
        """The answer is not needed any more."""
        self._open.pop(number, None)

    def on_shown(self, peer: str, shown: Shown, now: float) -> bool:
        """False: nobody asked that of this member, or it is not the part that is due."""
        asked = self._open.get(shown.question)
        if asked is None or asked.of != peer or shown.start != len(asked.parts):
            return False
        if shown.total == 0:
            self._end(shown.question, None, "it has none")
        elif shown.total > asked.wanted.most_bytes:
            self._end(shown.question, None, f"what it shows has {shown.total} bytes, and can't have so many")
        elif len(shown.part) != min(PART_BYTES, shown.total - shown.start):
            # Parts of a byte each would keep everybody waiting for ever.
            self._end(shown.question, None, "it shows parts that are not as long as they should be")
        else:
            asked.parts += shown.part
            asked.news_at = now
            asked.signature = shown.signature or asked.signature
            if len(asked.parts) == shown.total:
                self._end(shown.question, bytes(asked.parts), "")
            elif len(asked.parts) - asked.asked_from >= PART_BYTES * PARTS_AT_ONCE:
                asked.asked_at = None  # all that one question brings: the rest is asked for at once
        return True

    def due(self, here: set[str], now: float) -> list[tuple[str, dict[str, object]]]:
        """(whom to ask, the fields of its `Show`).  Somebody who is not here can't answer: it is not its fault."""
        asks: list[tuple[str, dict[str, object]]] = []
        for number, each in list(self._open.items()):
            if each.of not in here:
                each.asked_at, each.news_at = None, now
            elif now - each.news_at >= PATIENCE_S:
                self._end(number, None, f"it showed nothing for {PATIENCE_S:g} s", silent=True)
            elif each.asked_at is None or now - max(each.asked_at, each.news_at) >= ASK_AGAIN_S:
                each.asked_at, each.asked_from = now, len(each.parts)
                asks.append((each.of, _fields(number, each)))
        return asks

    def take_answers(self) -> list[MemberAnswer]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def asked(self) -> set[str]:
        """Members that owe an answer."""
        return {each.of for each in self._open.values()}

    def _end(self, number: int, raw: bytes | None, why_none: str, silent: bool = False) -> None:
        asked = self._open.pop(number)
        self._answers.append(
            MemberAnswer(
                number, asked.of, asked.wanted, raw, asked.signature, why_none, silent, bool(asked.parts)
            )
        )


def _fields(number: int, asked: _OpenQuestion) -> dict[str, object]:
    """Of a `Show`, but for the session and its number."""
    wanted = asked.wanted
    return {
        "question": number,
        "what": wanted.what,
        "fragment": wanted.fragment,
        "version": wanted.version,
        "chunk": wanted.chunk,
        "start": len(asked.parts),
        "round_no": wanted.round_no,
        "peer": wanted.peer,
    }


# ---- holding proof -----------------------------------------------------------------------------------------
# Whether a member holds the state that it says it holds, where nobody's word settles that. Pure.
#
# Holders of a version show a keyed hash of the chunk that its nonce names: whoever does not have the bytes
# can't name it. What the right one is follows from the members that made the version. Where those are gone,
# or somebody shows another one, the member shows the list of hashes (its root is the settled digest) and that
# one chunk, and the hash is calculated here. Used by the settling of the run machine.


def shown_value(said: bytes, nonce: bytes) -> bytes:
    """What a beat shows under this nonce; empty if it shows nothing, or something under another one."""
    fits = len(said) == TAG_BYTES + HASH_BYTES and said[:TAG_BYTES] == nonce[:TAG_BYTES]
    return said[TAG_BYTES:] if fits else b""


@dataclass(frozen=True)
class HoldingClaim:
    """What a member says that it holds."""

    peer: str
    fragment: Fragment
    version: int
    digest: bytes  # settled
    nonce: bytes
    state_bytes: int  # of a chunk


class HoldingProof:
    def __init__(self, held: HoldingClaim, questions: Questions, now: float) -> None:
        self.held = held
        self.value = b""  # what its holders show, once it is known
        self.unproven = ""  # why it did not prove that it holds it
        self._questions = questions
        self._hashes: list[bytes] = []
        fragment, most = held.fragment, HASH_BYTES * held.fragment.count
        wanted = WantedProof(What.HASHES, fragment.number, held.version, fragment.first, most)
        self._number = questions.ask(held.peer, wanted, now)

    @property
    def over(self) -> bool:
        return bool(self.value or self.unproven)

    def close(self) -> None:
        self._questions.drop(self._number)

    def on_answer(self, answer: MemberAnswer, now: float) -> bool:
        """True if it was an answer to a question of this check."""
        if answer.number != self._number or answer.of != self.held.peer:
            return False
        if answer.raw is None:
            self.unproven = f"it did not show that it holds version {self.held.version}: {answer.why_none}"
        elif answer.wanted.what is What.HASHES:
            self._on_hashes(answer.raw, now)
        else:
            self._on_state(answer.raw)
        return True

    def _on_hashes(self, raw: bytes, now: float) -> None:
        held = self.held
        hashes = split_hashes(raw)
        if len(hashes) != held.fragment.count or root_of(hashes) != held.digest:
            self.unproven = f"the hashes that it shows of version {held.version} are not the run's"
            return
        self._hashes = hashes
        chunk = held.fragment.first + drawn_chunk(held.nonce, held.fragment.count)
        wanted = WantedProof(What.STATE, held.fragment.number, held.version, chunk, held.state_bytes)
        self._number = self._questions.ask(held.peer, wanted, now)

    def _on_state(self, raw: bytes) -> None:
        held = self.held
        if hash_bytes(raw) != self._hashes[drawn_chunk(held.nonce, held.fragment.count)]:
            self.unproven = f"the chunk that it shows of version {held.version} is not the run's"
        else:
            self.value = keyed_hash(held.nonce, raw)
