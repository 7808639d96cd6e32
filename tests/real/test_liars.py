"""P18 with real processes: one machine's memory flips a bit, and that peer alone is out, with proof."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from farflung.protocol.process.exit_codes import REFUSED

pytestmark = pytest.mark.slow

SHARED = Path("/dev/shm")
TAKES_AGAIN = "downloading them again"
IS_HERE = " is here, digest "
TIMES_MOST = 5


@pytest.mark.hard
@pytest.mark.forked_peers
def test_P18_a_peer_whose_memory_went_wrong_is_found_out_and_the_others_keep_their_state(stage: Any) -> None:
    stage.write_run(min_peers=2, sync_every=5, dead_after_s=10.0)
    stage.coordinate()
    for name in ("ann", "bob", "cat"):
        stage.join(name)
    stage.until(lambda seen: seen["version"] >= 2 and len(seen["members"]) == 3, "three peers train")
    # What it has just become it may be asked to show before it is asked what it calculates from it.  Then it takes the
    # run's state again, as any peer that holds other bytes, and its memory goes wrong once more.
    for again in range(TIMES_MOST):
        # What it is just taking again would be written over what goes wrong now.
        stage.until(
            lambda seen: is_banned(seen) or (takes_part(seen) == 3 and IS_HERE in since_it_took_again(stage)),
            "cat holds the run's state",
        )
        if is_banned(stage.status()) or not flip(stage.events("cat")[0]["pid"]):
            break
        stage.until(
            lambda seen, again=again: is_banned(seen) or stage.log("cat").count(TAKES_AGAIN) > again,
            "what cat holds is looked at",
        )
    assert stage.wait("cat") == REFUSED
    assert "is proven wrong in chunk" in stage.log("cat")
    seen = stage.status()
    stage.until(lambda now: now["version"] >= seen["version"] + 2, "the others go on")
    for name in ("ann", "bob"):
        assert "differs from the run's" not in stage.log(name)
    states = {member["name"]: member["state"] for member in stage.status()["members"]}
    assert sorted(states.values()).count("banned") == 1 and len(states) == 3

    [proof] = (stage.folder / "run.data" / "evidence").glob("state-*.proof")
    told = stage.call("audit", "--evidence", str(proof))
    assert told.returncode == 1, told.stdout + told.stderr
    assert "signed a state that is not the run's" in told.stdout


def is_banned(seen: dict[str, Any]) -> bool:
    return any(member["state"] == "banned" for member in seen["members"])


def takes_part(seen: dict[str, Any]) -> int:
    return sum(member["participating"] for member in seen["members"])


def since_it_took_again(stage: Any) -> str:
    return str(stage.log("cat").rpartition(TAKES_AGAIN)[2])


def flip(agent_pid: int) -> bool:
    """One value of the outer momentum, in the memory that the agent shares with its trainer.  There is none any more
    where the agent was put out, and has ended, since the coordinator was last asked: then nothing is left to do."""
    for place in SHARED.glob(f"farflung-{agent_pid}-*"):
        with (place / "momentum").open("r+b") as file:
            file.write(struct.pack("<f", 0.125))
        return True
    return False
