"""One fragment at the trainer, as the agent knows it: what is loaded, what is frozen, which slots are in use.  Pure.

Part of the agent's view of its trainer (training.py).  It says how much of its own work the trainer keeps when it
loads a new anchor (P6), and into which slot it freezes next.
"""

from __future__ import annotations

from farflung.peer.local_messages import Frozen, Keep, Load, Opened, Resume


class Work:
    def __init__(self, fragment: int) -> None:
        self.fragment = fragment
        self.fresh = True  # the trainer has loaded nothing since it attached
        self.running = False  # taking inner steps, not waiting at the barrier for this fragment
        self.frozen: Frozen | None = None  # unmerged work that stands in a slot
        # The slot that a round is using, until its commit or abort is known.
        self.sent_slot: int | None = None
        self._loads = 0  # told and not yet answered

    @property
    def loading(self) -> bool:
        """The trainer may be reading the anchor: it must not be written."""
        return self._loads > 0

    @property
    def waiting(self) -> bool:
        """The trainer must be told how to go on: it stands at the barrier for this fragment, or will at its next
        freeze."""
        return self.frozen is not None and not self.running and not self.loading

    def on_attach(self) -> None:
        self.on_gone()

    def on_gone(self) -> None:
        """It died.  Work that stands in a slot is still good; the rest died with it."""
        self.running, self._loads = False, 0
        self.fresh = True

    def forget(self) -> None:
        """Nothing is kept: the next load is a first one."""
        self.frozen, self.fresh = None, True

    def load(self, version: int, consumed: Frozen | None) -> Load:
        """The anchor is at a new version (or the trainer is fresh).  `consumed`: what a commit used."""
        if self.fresh:
            return self._load(version, "restore" if self.frozen is not None else "drop", self.frozen)
        return self._load(version, "all" if consumed is None else "rest", consumed)

    def drop(self, version: int) -> Load:
        self.frozen = None
        return self._load(version, "drop", None)

    def _load(self, version: int, keep: Keep, work: Frozen | None) -> Load:
        """`work`: what a commit used (rest), or what the trainer takes as its own (restore)."""
        self.fresh, self.running = False, True
        self._loads += 1
        return Load(
            version=version,
            keep=keep,
            slot=work.slot if work else 0,
            tokens=work.tokens if work else 0,
            steps=work.steps if work else 0,
            spare=self._spare(),
            fragment=self.fragment,
        )

    def on_loaded(self) -> None:
        self._loads = max(0, self._loads - 1)  # one of a trainer that is gone may still come

    def on_frozen(self, frozen: Frozen) -> None:
        if self.loading:
            # It crossed the Load.  What it speaks of may be merged or dropped by now, and its slot may be the one
            # that the Load names as spare.  The trainer goes on, and its next freeze holds all that it still owes.
            return
        self.frozen = frozen
        self.running = False

    def resume(self) -> Resume:
        self.running = True
        return Resume(spare=self._spare(), fragment=self.fragment)

    def opened(self, hold: bool) -> Opened:
        """`hold`: the round uses what stands frozen, and the trainer, which goes on, is not to freeze again before it
        knows the end."""
        self.running = self.running and not hold
        return Opened(fragment=self.fragment, hold=hold)

    def _spare(self) -> int:
        """A slot that holds neither the newest frozen work nor what a round is using."""
        taken = {self.sent_slot, self.frozen.slot if self.frozen is not None else None}
        return min({0, 1, 2} - taken)
