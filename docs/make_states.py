"""Draws the tables of states into architecture.md, between two marks, so that the page never lags behind the code.

python docs/make_states.py            writes the section
python docs/make_states.py --check    exit code 1 if the page has another one
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from farflung.peer.machine.replica_states import ROLES, STANDS, Empty, Idle
from farflung.protocol.states import GONE, HERE, PEER_STATES, PeerState

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- states: written by docs/make_states.py -->", "<!-- states end -->"
WORDS = """## States

Three tables say which event leads from which state to which; any other event in a state is a mistake in the program
and raises `IllegalMove` (`protocol/states.py`). An arrow carries the events that lead along it.
"""
STAND_WORDS = """What a replica holds of its fragment's state (`ReplicaState` in `peer/machine/replica_states.py`).
Chunks are served and saved in `Current` alone, and there only once the coordinator has confirmed the digest (P4).
Whatever writes all values at once (the trainer, a checkpoint, `[start]`, pieces that had arrived before a crash) does
so in `Filling`, one at a time, and there nothing that arrives is used.
"""
ROLE_WORDS = """What part it has in a round, and what became of the work that it sent (`Role`, in the same file).
`Unsure` and `Merged` are why a peer that missed a commit loses no step, and counts none twice (P6, P7).
"""
PEER_WORDS = """Where a peer is, as the status shows it (`protocol/states.py`). Beats are looks at a peer, and
between two of them it may have been anywhere: any word may follow any other, until it is gone.
"""


def section() -> str:
    drawn = (
        (STAND_WORDS, STANDS.drawn(Empty, _class_name)),
        (ROLE_WORDS, ROLES.drawn(Idle, _class_name)),
        (PEER_WORDS, PEER_STATES.drawn(PeerState.JOINING, str, boxes={"here": HERE, "gone": GONE})),
    )
    blocks = [f"{words}\n```mermaid\n{diagram}\n```\n" for words, diagram in drawn]
    return "\n".join([BEGIN, WORDS, *blocks, END])


def _class_name(kind: type) -> str:
    return kind.__name__


def with_section(page: str) -> str:
    """The page with its section as it should be; at the end where it has none yet."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    if not marked.search(page):
        return f"{page.rstrip()}\n\n{section()}\n"
    return marked.sub(lambda _: section(), page)


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return 0 if page == with_section(page) else 1
    PAGE.write_text(with_section(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
