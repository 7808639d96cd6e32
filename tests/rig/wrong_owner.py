"""A peer of the real program that adds up wrongly, all that it adds up of one kind.

`python tests/rig/wrong_owner.py group join URL ...` is `farflung join URL ...` whose sums of its group in a mesh are
others than they should be; with `result` it is the results that it encodes, as a root or as the owner in a flat round.
"""

from __future__ import annotations

from farflung.collectives.round.effects import Merge
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.round_words import SUM_CODEC
from farflung.simulator.bad_peers import forged_sum


def add_up_wrongly(of_groups: bool) -> None:
    """From now on, in this process."""
    merge = OuterState.merge

    def wrong(state: OuterState, effect: Merge) -> bytes:
        made = merge(state, effect)
        lies = effect.decision_no and (effect.codec == SUM_CODEC) == of_groups
        return forged_sum(made) if lies else made

    OuterState.merge = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    import sys

    from farflung.console.main import main

    add_up_wrongly(of_groups=sys.argv.pop(1) == "group")
    sys.exit(main())
