"""The agent's hand for the archive: what every version was made of goes to the place of the checkpoints, for good.

Owned by the agent, which tells it of commits, of results as they are applied, and of each state that is whole.  A
version goes out, from a thread of its own, when the next one is rolled on it: this peer's state was the run's then.
One of which not every chunk was rolled here (its state was fetched) is left out: others have it.  A place that fails,
or does not keep up, costs versions in the archive and no round.  Must not know who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from farflung.checkpoints.archive import Archive, RoundHead
from farflung.collectives.round.effects import Install, Roll, Seal
from farflung.peer.worker import Job, Submit, Worker, nothing
from farflung.protocol.digests import root_of
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Payload
from farflung.protocol.process.log_lines import LineWriter
from farflung.protocol.round_words import Commit
from farflung.protocol.run_terms import Attached, Terms

BEHIND_BYTES = 256 << 20  # so much may wait to be written, or one version if that is more
CLOSE_S = 5.0
FINISH_S = 60.0  # the last versions of a run that is over are worth more patience
COMMITS_KEPT = 64  # of each fragment, which wait for their results to be applied


@dataclass
class _RolledVersion:
    """The version that one fragment is being rolled to, and the one that it was rolled to before."""

    version: int = -1
    payloads: dict[int, Payload] = field(default_factory=dict)  # by chunk
    commits: dict[int, Commit] = field(default_factory=dict)  # by version
    whole: tuple[RoundHead, list[Payload]] | None = None  # rolled and hashed here


class Archiving:
    """`say` tells people.  Built when the model is known, if an archive is wanted."""

    def __init__(self, archive: Archive, attached: Attached, submit: Submit, say: LineWriter) -> None:
        self._archive, self._attached, self._say = archive, attached, say
        self._worker = Worker("archive", submit)
        self._coming = [_RolledVersion() for _ in attached.fragments]
        self._told = ""  # the last problem: said once
        known = attached.known
        self._do(lambda: archive.begin(known.run_id, known.manifest), "the archive")

    def follow(self, terms: Terms) -> None:
        run_id = self._attached.known.run_id
        self._do(lambda: self._archive.amend(run_id, terms.amendments), "the host's amendments")

    def on_commit(self, commit: Commit) -> None:
        commits = self._coming[commit.fragment].commits
        commits[commit.version] = commit
        if len(commits) > COMMITS_KEPT:
            del commits[min(commits)]

    def changed(self, effect: Install | Roll) -> None:
        """In the order in which the state takes them."""
        coming = self._coming[self._attached.fragment_of(effect.chunk).number]
        if isinstance(effect, Install):
            coming.payloads.pop(effect.chunk, None)
            coming.whole = None  # what was rolled is given up: it may not have been the run's
            return
        if effect.version != coming.version:
            self._put(coming)
            coming.version, coming.payloads = effect.version, {}
        coming.payloads[effect.chunk] = effect.payload

    def sealed(self, seal: Seal, era: int, digest: bytes, hashes: list[bytes]) -> None:
        """`hashes`: of the fragment's chunks at this version."""
        coming, chunks = self._coming[seal.fragment], self._attached.fragments[seal.fragment].chunks
        commit, payloads = coming.commits.get(seal.version), coming.payloads
        rolled = seal.version == coming.version and len(payloads) == len(chunks)
        if commit is None or not rolled or root_of(hashes) != digest:
            return
        in_order = [payloads[chunk] for chunk in chunks]
        head = RoundHead(
            run_id=self._attached.known.run_id,
            era=era,
            commit=commit,
            digest=digest,
            chunks=b"".join(hashes),
            sizes=tuple(map(len, in_order)),
        )
        coming.whole, coming.payloads = (head, in_order), {}

    def _put(self, coming: _RolledVersion) -> None:
        if coming.whole is None:
            return
        head, payloads = coming.whole
        coming.whole = None
        told = f"version {head.commit.version} of fragment {head.commit.fragment}"
        size_bytes = sum(head.sizes)
        if self._worker.waiting_bytes > max(BEHIND_BYTES, size_bytes):
            self._tell(f"{told} is not kept: {self._archive.url} does not keep up")
        else:
            self._do(lambda: self._archive.put(head, payloads), told, size_bytes)

    def close(self, finished: bool) -> None:
        for coming in self._coming:
            self._put(coming)
        self._worker.close(FINISH_S if finished else CLOSE_S)

    def _do(self, job: Job, what: str, size_bytes: int = 0) -> None:
        def tried() -> None:
            try:
                job()
            except (StoreError, OSError) as error:
                self._worker.later(partial(self._tell, f"{what} is not kept: {error}"))

        self._worker.submit(tried, nothing, size_bytes=size_bytes)

    def _tell(self, problem: str) -> None:
        if problem.partition(":")[2] != self._told:
            self._told = problem.partition(":")[2]
            self._say(f"{problem}; training goes on")
