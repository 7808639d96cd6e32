"""The entrance: may somebody who proved who it is come in now?  Pure.

Called by the run machine with each hello that the doorkeeper passed on.  It does not take the doorkeeper's word for the
signature: that process talks to strangers.  Whether the hello fits the run is the core's question; whom the host wants
is the modes' (coordinator/admission/).  The words of a refusal say what to do; its code is for programs.
"""

from __future__ import annotations

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.hello_check import HelloPassed, is_signed, refuse
from farflung.coordinator.run.core import Core
from farflung.protocol.errors import UserError
from farflung.protocol.messages import Hello, Refuse
from farflung.protocol.model_schema import first_difference
from farflung.protocol.signing import peer_id_of

DRAINING_RETRY_S = 5.0
FULL_RETRY_S = 30.0
EARLY_RETRY_S = 2.0
COMES_PER_MINUTE = 30.0  # one identity: each time is a line in the journal, and news for all members


class Entrance:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._comes: Quota[str] = Quota(COMES_PER_MINUTE / 60.0, COMES_PER_MINUTE)

    def refuses(self, passed: HelloPassed) -> Refuse | None:
        """None: it may come in."""
        core, hello = self._core, passed.hello
        if not is_signed(hello, passed.nonce):
            return refuse("signature", "the hello is not signed by the identity it names")
        peer = peer_id_of(hello.identity)
        if core.draining:
            why = "the coordinator is about to end, and takes nobody in any more; it may be back soon"
            return refuse("draining", why, DRAINING_RETRY_S)
        return (
            self._unfit(hello)
            or self._crowded(hello, peer)
            or next(filter(None, (mode.refuses(passed, peer) for mode in core.modes)), None)
            or self._restless(peer)
        )

    def _unfit(self, hello: Hello) -> Refuse | None:
        core = self._core
        if hello.helps and (too_early := self._nothing_to_help(hello)) is not None:
            return too_early
        if core.ledger.model is not None and not self._may_still_change():
            difference = first_difference(hello.model, core.ledger.model)
            if difference:
                return refuse("model", f"the model differs from the run's: {difference}")
        try:
            hello.model.fragments(core.ledger.fragments)
        except UserError as error:
            return refuse("model", str(error))
        if core.manifest.pipeline.stages > 1:
            return self._no_stage(hello.fragments)
        if hello.fragments != tuple(range(core.ledger.fragments)):
            held, all_of_them = ", ".join(map(str, hello.fragments)), core.ledger.fragments
            return refuse(
                "model",
                f"this run is no pipeline: each peer holds all of its {all_of_them} fragments, not {held}",
            )
        return None

    def _no_stage(self, offered: tuple[int, ...]) -> Refuse | None:
        """It offers stages that there are, each once."""
        stages = self._core.manifest.pipeline.stages
        if len(set(offered)) == len(offered) and max(offered) < stages:
            return None
        told = ", ".join(map(str, offered))
        return refuse("model", f"this run's model has stages 0 to {stages - 1}; offered were stages {told}")

    def _may_still_change(self) -> bool:
        """Nothing was learned and nobody who trains is here: a first peer that came with another model binds nobody."""
        alive = self._core.members.alive.values()
        return not self._core.ledger.learned and all(member.helps for member in alive)

    def _nothing_to_help(self, hello: Hello) -> Refuse | None:
        """Who comes without a trainer brings no model: it takes that of those who train."""
        if self._core.manifest.pipeline.stages > 1:
            why = "this run's model is cut into stages, and each of them is held by peers that compute it"
            return refuse("no-helpers", f"{why}: nobody helps here without a trainer")
        if self._core.ledger.model is None or self._may_still_change():
            why = "no peer that trains is here yet: who helps waits for one, which brings the model"
            return refuse("too-early", why, EARLY_RETRY_S)
        return None

    # ---- how many ----------------------------------------------------------------------------------------

    def _crowded(self, hello: Hello, peer: str) -> Refuse | None:
        core = self._core
        old = core.members.members.get(peer)
        if old is not None and old.alive and old.process != hello.process and old.closed_at is None:
            return refuse(
                "already-here",
                "this identity is already in the run as another process; stop that one, or use another identity file",
                retry_after_s=core.manifest.net.dead_after_s / 2,
            )
        if old is None and len(core.members.alive) >= core.manifest.run.max_peers:
            return refuse("full", f"the run is full: {core.manifest.run.max_peers} peers", FULL_RETRY_S)
        return None

    def _restless(self, peer: str) -> Refuse | None:
        """An identity that is let in, is thrown out or goes, and comes again without end."""
        if self._comes.take(peer, self._core.now):
            return None
        told = f"this identity came in more than {COMES_PER_MINUTE:g} times in a minute; waiting"
        return refuse("rate", told, max(1.0, self._comes.wait_s(peer, self._core.now)))
