"""Writes docs/states.md, the tables of states, so that the page never lags behind the code.

python docs/make_states.py            writes the page
python docs/make_states.py --check    exit code 1 if the page differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from farflung.peer.machine.fragment_rounds import ROLES, Idle
from farflung.peer.machine.held_fragment import STANDS, Empty
from farflung.protocol.states import GONE, HERE, PEER_STATES, PeerState

PAGE = Path(__file__).with_name("states.md")
TITLE = """# States

<!-- written by docs/make_states.py -->

Three tables say which event leads from which state to which: two for a fragment at a peer, and one for a peer as its
run's status shows it. They live in `peer/machine/held_fragment.py`, `peer/machine/fragment_rounds.py` and
`protocol/states.py`. An arrow carries the events that lead along it. Any other event in a state is a bug in the program
and raises `IllegalMove`.
"""
REPLICA_WORDS = """## The state of a fragment at a peer

What a peer holds of a fragment's state (`ReplicaState` in `peer/machine/held_fragment.py`). A peer serves and
saves chunks in `Current` only, and only once the coordinator has confirmed the digest (P4). Anything that writes all
values at once (the trainer, a checkpoint, `[start]`, pieces that arrived before a crash) does so in `Filling`, one
writer at a time. Chunks that arrive in `Filling` are not used.
"""
ROLE_WORDS = """## The part of a peer in a round

What a peer does in a round, and what became of the work that it sent (`Role` in `peer/machine/fragment_rounds.py`).
Because of `Unsure` and `Merged`, a peer that missed a commit loses no step and counts none twice (P6, P7).
"""
PEER_WORDS = """## A peer in the status

Where a peer is, as the status shows it (`PeerState` in `protocol/states.py`). Heartbeats are samples: between two of
them a peer may have passed through any state, so any state here may follow any other until the peer has left.
"""


def page() -> str:
    drawn = (
        (REPLICA_WORDS, STANDS.drawn(Empty, _class_name)),
        (ROLE_WORDS, ROLES.drawn(Idle, _class_name)),
        (PEER_WORDS, PEER_STATES.drawn(PeerState.JOINING, str, boxes={"here": HERE, "gone": GONE})),
    )
    blocks = [f"{words}\n```mermaid\n{diagram}\n```\n" for words, diagram in drawn]
    return "\n".join([TITLE, *blocks])


def _class_name(kind: type) -> str:
    return kind.__name__


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
