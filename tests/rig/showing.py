"""How made-up members, who have no bytes, show that they hold a version: by its nonce and its digest.

A real holder calculates with the bytes of a chunk (coordinator/court/questions.py).  Here the digest stands for
them: whoever names it and was told the nonce shows the same as the others, which is all that rounds and orders ask
for.
"""

from __future__ import annotations

from msgspec.structs import replace

from farflung.coordinator.ledger.ledger import Ledger
from farflung.protocol.digests import keyed_hash
from farflung.protocol.messages import TAG_BYTES, FragmentBeat


def shown_under(nonce: bytes, digest: bytes) -> bytes:
    """For a beat."""
    return nonce[:TAG_BYTES] + keyed_hash(nonce, digest)


def showing(ledger: Ledger, said: FragmentBeat) -> FragmentBeat:
    """The same word, of somebody who holds what it says; whoever holds nothing shows nothing."""
    if said.version < 0:
        return said
    nonce = ledger.nonce_of(said.fragment, said.version)
    return replace(said, shown=shown_under(nonce, said.digest))


def value_of(ledger: Ledger, fragment: int, version: int, digest: bytes) -> bytes:
    """What the ledger knows of a version whose made-up holders have shown it."""
    return keyed_hash(ledger.nonce_of(fragment, version), digest)


def let_all_be_shown(ledger: Ledger) -> None:
    """As if somebody had shown each version that has a digest, in this era."""
    for fragment, book in enumerate(ledger.books):
        book.shown.update({v: value_of(ledger, fragment, v, digest) for v, digest in book.digests.items()})
