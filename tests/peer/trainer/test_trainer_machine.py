"""The trainer's machine, event by event, as transcripts; the events are told in rig/trainer_player.py.

That its counts hold in any order of events, and what sees a broken rule of it, is in test_trainer_promises.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from farflung.peer.data.leased_data import AHEAD_S
from farflung.peer.local.words import LeasesNow, NeedSamples
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import NO_LEASED_DATA
from farflung.protocol.messages import UNKNOWN_LENGTH, Lease
from rig.trainer_player import Player, check


def test_the_first_peer_founds_the_run_and_training_waits_from_each_freeze_to_the_agents_word() -> None:
    check("""
        > rules blocking 2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > hear Provide
            WriteAnchor
            SayWord Provided
        > hear LoadState version=0 keep=drop
            LoadAnchor fragment=0 version=0 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=0
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > at 1.5
        > hear LeasesNow 1:0-8  # no reason to go on
        > hear LoadState version=1 keep=rest slot=0 tokens=20 steps=2 spare=1  # the commit used it
            LoadAnchor fragment=0 version=1 keep=rest slot=0 steps=0 used_steps=2
            SayWord Loaded version=1
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=20 steps=2 used=[] step=4
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear LoadState version=2 keep=all spare=2  # the commit was made without it
            LoadAnchor fragment=0 version=2 keep=all slot=0 steps=2
            SayWord Loaded version=2
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=2
            SayFrozen Frozen slot=2 tokens=40 steps=4 used=[] step=6
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear ResumeSteps spare=0  # no commit
            GoOn
        > counts
            fragment 0 at 2: 4 steps, 40 tokens, spare 0
            stepping, 6 steps in all, waited 1.5 s
    """)


def test_all_fragments_are_frozen_at_one_step_and_each_is_answered_for_itself() -> None:
    check("""
        > rules blocking 2 fragments=2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > hear LoadState version=4 keep=drop
            LoadAnchor fragment=0 version=4 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=4
        > hear LoadState version=3 keep=drop fragment=1
            LoadAnchor fragment=1 version=3 keep=drop slot=0 steps=0
            SayWord Loaded version=3 fragment=1
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            Freeze fragment=1 slot=0
            SayFrozen
                Frozen slot=0 tokens=20 steps=2 used=[] step=2 more=true
                Frozen slot=0 tokens=20 steps=2 used=[] fragment=1 step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear LoadState version=5 keep=rest slot=0 tokens=20 steps=2 spare=1
            LoadAnchor fragment=0 version=5 keep=rest slot=0 steps=0 used_steps=2
            SayWord Loaded version=5
        > hear ResumeSteps spare=2 fragment=1
            GoOn
        > counts
            fragment 0 at 5: 0 steps, 0 tokens, spare 1
            fragment 1 at 3: 2 steps, 20 tokens, spare 2
            stepping, 2 steps in all, waited 0 s
    """)


def test_with_overlap_a_result_waits_for_its_time_and_a_late_round_is_waited_for() -> None:
    check("""
        > rules overlap 3 overlap_steps=2 mix=0.5
        > begin
        > step 10
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            GoAhead fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=30 steps=3 used=[] step=3
            ForgetLoss
            GoOn
        > hear RoundOpened hold=true
        > hear LoadState version=1 keep=rest slot=0 tokens=30 steps=3 spare=1  # too early: kept back
        > step 10
            GoOn
        > step 10
            LoadAnchor fragment=0 version=1 keep=rest slot=0 steps=2 used_steps=3 mix=0.5
            SayWord Loaded version=1
            GoOn
        > step 10
            Freeze fragment=0 slot=1
            GoAhead fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=30 steps=3 used=[] step=6
            ForgetLoss
            GoOn
        > hear RoundOpened hold=true
        > step 10
            GoOn
        > step 10
            GoOn
        > at 5
        > step 10
            Warn text='training waits: a round takes longer than a period; raise sync_every or period_s'
            WaitBefore stand='held up'
        > silence
        > at 36
        > silence
            Warn text='training waits: a round takes longer than a period; raise sync_every or period_s'
        > hear LoadState version=2 keep=all spare=2
            LoadAnchor fragment=0 version=2 keep=all slot=0 steps=6
            SayWord Loaded version=2
            Freeze fragment=0 slot=2
            GoAhead fragment=0 slot=2
            SayFrozen Frozen slot=2 tokens=60 steps=6 used=[] step=9
            ForgetLoss
            GoOn
        > counts
            fragment 0 at 2: 6 steps, 60 tokens, spare 2, blocked
            stepping, 9 steps in all, waited 31 s
    """)


def test_the_next_freeze_takes_the_place_of_one_that_no_round_took() -> None:
    check("""
        > rules overlap 2
        > begin
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            GoAhead fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            GoOn
        > hear ResumeSteps spare=1
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=1
            GoAhead fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=40 steps=4 used=[] step=4
            ForgetLoss
            GoOn
        > counts
            fragment 0 at 0: 4 steps, 40 tokens, spare 1, blocked
            stepping, 4 steps in all, waited 0 s
    """)


def test_with_streaming_each_fragment_has_its_own_moment() -> None:
    check("""
        > rules streaming 4 fragments=2 overlap_steps=1
        > begin
        > step 10
            GoOn
        > step 10
            Freeze fragment=1 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] fragment=1 step=2
            GoOn
        > hear RoundOpened hold=true fragment=1
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=40 steps=4 used=[] step=4
            ForgetLoss
            GoOn
        > hear LoadState version=1 keep=rest slot=0 tokens=20 steps=2 spare=1 fragment=1
            LoadAnchor fragment=1 version=1 keep=rest slot=0 steps=2 used_steps=2
            SayWord Loaded version=1 fragment=1
        > hear RoundOpened hold=true fragment=0
        > step 10
            GoOn
        > step 10
            Freeze fragment=1 slot=1
            SayFrozen Frozen slot=1 tokens=40 steps=4 used=[] fragment=1 step=6
            GoOn
        > counts
            fragment 0 at 0: 6 steps, 60 tokens, spare 0, blocked
            fragment 1 at 1: 4 steps, 40 tokens, spare 1, blocked
            stepping, 6 steps in all, waited 0 s
    """)


def test_a_trainer_that_is_held_up_takes_what_it_had_kept_back() -> None:
    """No step will come for a while, and the agent waits for the answer."""
    check("""
        > rules streaming 4 fragments=2 overlap_steps=3
        > begin
        > step
            GoOn
        > step
            Freeze fragment=1 slot=0
            SayFrozen Frozen slot=0 tokens=2 steps=2 used=[] fragment=1 step=2
            GoOn
        > step
            GoOn
        > step
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=4 steps=4 used=[] step=4
            ForgetLoss
            GoOn
        > hear RoundOpened hold=true
        > hear ResumeSteps spare=1 fragment=1
        > step
            GoOn
        > step
            Freeze fragment=1 slot=1
            SayFrozen Frozen slot=1 tokens=6 steps=6 used=[] fragment=1 step=6
            GoOn
        > hear LoadState version=1 keep=all spare=2 fragment=1  # two steps too early, as it turns out
        > step
            GoOn
        > step
            LoadAnchor fragment=1 version=1 keep=all slot=0 steps=8
            SayWord Loaded version=1 fragment=1
            Warn text='training waits: a round takes longer than a period; raise sync_every or period_s'
            WaitBefore stand='held up'
    """)


def test_what_is_kept_back_is_taken_before_the_trainer_waits_for_data() -> None:
    check("""
        > rules overlap 2 overlap_steps=3
        > begin
        > step
            GoOn
        > step
            Freeze fragment=0 slot=0
            GoAhead fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=2 steps=2 used=[] step=2
            ForgetLoss
            GoOn
        > hear LoadState version=1 keep=rest slot=0 tokens=2 steps=2 spare=1
        > read 2
            SayWord NeedSamples samples=100 want=8
            LoadAnchor fragment=0 version=1 keep=rest slot=0 steps=0 used_steps=2
            SayWord Loaded version=1
            WaitBefore stand='without data'
    """)


def test_P6_P7_a_restarted_trainer_takes_over_the_slot_and_where_to_read_on() -> None:
    check("""
        > rules blocking 2 fragments=2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > hear LeasesNow 1:0-8@4,2
        > hear LoadState version=3 keep=restore slot=2 tokens=40 steps=4 spare=0
            LoadAnchor fragment=0 version=3 keep=restore slot=2 steps=4
            ForgetLoss
            SayWord Loaded version=3
        > hear LoadState version=3 keep=drop fragment=1  # nothing of it stood frozen
            LoadAnchor fragment=1 version=3 keep=drop slot=0 steps=0
            SayWord Loaded version=3 fragment=1
            GoOn
        > counts
            fragment 0 at 3: 4 steps, 40 tokens, spare 0
            fragment 1 at 3: 0 steps, 0 tokens, spare 0
            stepping, 0 steps in all, waited 0 s
        > read 2
            ReadSamples Span lease=1 epoch=0 start=2 stop=4
        > step
            CopyFragments fragments=[0]
            PutBack fragments=[0]
            GoOn
        > read 4
            SayWord NeedSamples samples=100 want=4
            ReadSamples Span lease=1 epoch=0 start=4 stop=8
        > step
            Freeze fragment=0 slot=0
            Freeze fragment=1 slot=0
            SayFrozen
                Frozen slot=0 tokens=60 steps=5 used=[(Used lease=1 upto=8)] step=2 more=true
                Frozen slot=0 tokens=30 steps=2 used=[(Used lease=1 upto=8)] fragment=1 step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear LoadState version=4 keep=rest slot=2 tokens=40 steps=4 spare=1  # the predecessor's work was used
            LoadAnchor fragment=0 version=4 keep=rest slot=2 steps=1 used_steps=4
            SayWord Loaded version=4
        > hear ResumeSteps spare=1 fragment=1
            GoOn
        > counts
            fragment 0 at 4: 1 steps, 20 tokens, spare 1
            fragment 1 at 3: 2 steps, 30 tokens, spare 1
            stepping, 2 steps in all, waited 0 s
    """)


def test_P7_what_was_dropped_in_one_fragment_is_read_again_and_put_back_in_the_other() -> None:
    check("""
        > rules blocking 3 fragments=2
        > begin
        > hear LeasesNow 1:0-8
        > read 2
            ReadSamples Span lease=1 epoch=0 start=0 stop=2
        > step
            GoOn
        > read 2
            ReadSamples Span lease=1 epoch=0 start=2 stop=4
        > step
            GoOn
        > hear LeasesNow 1:0-8
        > hear LoadState version=0 keep=drop spare=1 fragment=1
            LoadAnchor fragment=1 version=0 keep=drop slot=0 steps=0
            SayWord Loaded version=0 fragment=1
        > read 2
            ReadSamples Span lease=1 epoch=0 start=0 stop=2
        > step
            CopyFragments fragments=[0]
            PutBack fragments=[0]
            Freeze fragment=0 slot=0
            Freeze fragment=1 slot=1
            SayFrozen
                Frozen slot=0 tokens=20 steps=2 used=[(Used lease=1 upto=4)] step=3 more=true
                Frozen slot=1 tokens=10 steps=1 used=[(Used lease=1 upto=2)] fragment=1 step=3
            ForgetLoss
            WaitBefore stand='at the barrier'
        > counts
            fragment 0 at 0: 2 steps, 20 tokens, spare 0, blocked
            fragment 1 at 0: 1 steps, 10 tokens, spare 1, blocked
            at the barrier, 3 steps in all, waited 0 s
    """)


def test_a_drop_begins_a_period_and_forgets_the_loss() -> None:
    check("""
        > rules blocking 3
        > begin
        > step 10
            GoOn
        > step 10
            GoOn
        > hear LoadState version=1 keep=drop spare=2
            LoadAnchor fragment=0 version=1 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=1
        > step 10
            GoOn
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=2
            SayFrozen Frozen slot=2 tokens=30 steps=3 used=[] step=5
            ForgetLoss
            WaitBefore stand='at the barrier'
    """)


def test_a_load_between_the_step_and_the_freeze_counts_before_the_freeze() -> None:
    check("""
        > rules blocking 2
        > begin
        > step 10
            GoOn
        > count 10
        > hear LoadState version=1 keep=drop
            LoadAnchor fragment=0 version=1 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=1
        > heard
            GoOn
    """)


def test_P7_nothing_is_read_while_the_agent_does_not_know_whose_the_leases_are() -> None:
    check("""
        > rules blocking 4
        > begin
        > read 2
            SayWord NeedSamples samples=100 want=8
            WaitBefore stand='without data'
        > hear LeasesNow 1:0-4
        > read 2
            SayWord NeedSamples samples=100 want=4
            ReadSamples Span lease=1 epoch=0 start=0 stop=2
        > step
            GoOn
        > hear LeasesNow unsure
        > read 2
            SayWord NeedSamples samples=100 want=8
            WaitBefore stand='without data'
        > at 30
        > silence
            Warn text='waiting for data: no samples are leased to this peer; the agent says why'
        > hear LeasesNow 1:0-4@0  # less than was learned: it is not read again
        > read 2
            SayWord NeedSamples samples=100 want=6
            ReadSamples Span lease=1 epoch=0 start=2 stop=4
    """)


def test_tokens_are_those_said_or_those_handed_out_or_one() -> None:
    check("""
        > rules blocking 9
        > begin
        > hear LeasesNow 1:0-8
        > read 2
            ReadSamples Span lease=1 epoch=0 start=0 stop=2
        > step
            GoOn
        > read 2
            ReadSamples Span lease=1 epoch=0 start=2 stop=4
        > step 3
            GoOn
        > step
            GoOn
        > counts
            fragment 0 at 0: 3 steps, 14 tokens, spare 0
            stepping, 3 steps in all, waited 0 s
    """)


def test_by_the_clock_a_period_begins_with_the_round_and_a_step_too_many_is_not_begun() -> None:
    check("""
        > rules blocking 99 period_s=10.0
        > begin
        > at 4
        > step 10
            GoOn
        > at 8
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > at 9
        > hear RoundOpened hold=false
        > hear ResumeSteps spare=1
            GoOn
        > at 13
        > step 10
            GoOn
        > at 17
        > step 10
            Freeze fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=40 steps=4 used=[] step=4
            ForgetLoss
            WaitBefore stand='at the barrier'
    """)


@pytest.mark.parametrize(
    ("word", "stopped"),
    [
        ("Finish version=3", False),
        ("Stop code=left reason=asked", True),
        ("Stop code=finished reason=done", True),
    ],
)
def test_the_end_of_the_run_ends_the_wait_and_steps_are_the_scripts_own_affair(
    word: str, stopped: bool
) -> None:
    check(f"""
        > rules blocking 2
        > begin
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > at 2
        > hear {word}
            RunOver stopped={str(stopped).lower()}
        > step 10
        > read 2
        > counts
            fragment 0 at 0: 2 steps, 20 tokens, spare 0, blocked
            over, 2 steps in all, waited 2 s
    """)


def test_a_refusal_is_said_again_to_a_script_that_goes_on() -> None:
    check("""
        > rules blocking 2
        > begin
        > step 10
            GoOn
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        > at 2
        > hear Stop code=refused reason=banned
            EndWithRefusal code=refused reason=banned
        > step 10
            EndWithRefusal code=refused reason=banned
        > read 2
            EndWithRefusal code=refused reason=banned
        > counts
            fragment 0 at 0: 2 steps, 20 tokens, spare 0, blocked
            refused, 2 steps in all, waited 0 s
    """)


def test_a_stop_before_the_runs_state_is_here_is_a_refusal() -> None:
    check("""
        > rules blocking 2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > hear Stop code=finished reason=over
            EndWithRefusal code=finished reason=over
    """)


def test_the_end_loads_all_fragments_at_once_and_a_trainer_that_waits_takes_no_step() -> None:
    check("""
        > rules blocking 1 fragments=2
        > begin
        > step 10
            Freeze fragment=0 slot=0
            Freeze fragment=1 slot=0
            SayFrozen
                Frozen slot=0 tokens=10 steps=1 used=[] step=1 more=true
                Frozen slot=0 tokens=10 steps=1 used=[] fragment=1 step=1
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear Finish version=1 fragments=2
            LoadAnchor fragment=0 version=1 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=1
            LoadAnchor fragment=1 version=1 keep=drop slot=0 steps=0
            SayWord Loaded version=1 fragment=1
            RunOver stopped=false
        > counts
            fragment 0 at 1: 0 steps, 0 tokens, spare 0
            fragment 1 at 1: 0 steps, 0 tokens, spare 0
            over, 1 steps in all, waited 0 s
    """)


def test_P7_no_sample_is_read_again_for_steps_that_the_end_drops() -> None:
    check("""
        > rules streaming 8 fragments=2
        > begin
        > hear LeasesNow 1:0-64
        > read 8
            ReadSamples Span lease=1 epoch=0 start=0 stop=8
        > step
            GoOn
        > hear Finish version=1 fragments=2
            LoadAnchor fragment=0 version=1 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=1
            LoadAnchor fragment=1 version=1 keep=drop slot=0 steps=0
            SayWord Loaded version=1 fragment=1
            RunOver stopped=false
        > read 8
        > counts
            fragment 0 at 1: 0 steps, 0 tokens, spare 0
            fragment 1 at 1: 0 steps, 0 tokens, spare 0
            over, 1 steps in all, waited 0 s
    """)


def test_a_finish_before_the_runs_state_is_here_still_waits_for_it() -> None:
    check("""
        > rules blocking 2
        > attach
            SayWord Attach pid=7
            WaitBefore stand=attaching
        > at 31
        > silence
            Warn text="still waiting for the model weights; the agent's log has the reason"
        > hear Finish version=3
            RunOver stopped=false
        > hear LoadState version=3 keep=drop
            LoadAnchor fragment=0 version=3 keep=drop slot=0 steps=0
            ForgetLoss
            SayWord Loaded version=3
        > counts
            fragment 0 at 3: 0 steps, 0 tokens, spare 0
            over, 0 steps in all, waited 0 s
    """)


def test_an_agent_that_is_gone_is_a_refusal() -> None:
    check("""
        > rules blocking 2
        > begin
        > gone
            EndWithRefusal code=agent reason='the agent is gone'
        > step
            EndWithRefusal code=agent reason='the agent is gone'
    """)


def test_a_wait_that_the_script_broke_off_is_begun_again() -> None:
    check("""
        > rules blocking 1
        > begin
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=10 steps=1 used=[] step=1
            ForgetLoss
            WaitBefore stand='at the barrier'
        > step 10
            WaitBefore stand='at the barrier'
        > read 2
            WaitBefore stand='at the barrier'
        > hear ResumeSteps spare=1
            GoOn
    """)


def test_the_machine_needs_neither_tensors_nor_sockets() -> None:
    hidden = "import sys; sys.modules.update(torch=None, zmq=None); import farflung.peer.trainer.machine"
    subprocess.run([sys.executable, "-c", hidden], check=True)


# ---- data


def test_a_script_that_never_asks_for_leased_samples_hears_once_what_that_means() -> None:
    check(
        f"""
        > rules blocking 1
        > begin
        > step 10
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=10 steps=1 used=[] step=1
            Warn text={NO_LEASED_DATA!r}
            ForgetLoss
            WaitBefore stand='at the barrier'
        > hear ResumeSteps spare=1
            GoOn
        > step 10
            Freeze fragment=0 slot=1
            SayFrozen Frozen slot=1 tokens=20 steps=2 used=[] step=2
            ForgetLoss
            WaitBefore stand='at the barrier'
        """,
        shows_own_data=True,
    )


def test_a_script_that_reads_leased_samples_hears_nothing_of_it() -> None:
    check(
        """
        > rules blocking 1
        > begin
        > read 2
            SayWord NeedSamples samples=100 want=8
            WaitBefore stand='without data'
        > hear LeasesNow 1:0-4
        > read 2
            SayWord NeedSamples samples=100 want=4
            ReadSamples Span lease=1 epoch=0 start=0 stop=2
        > step
            Freeze fragment=0 slot=0
            SayFrozen Frozen slot=0 tokens=10 steps=1 used=[(Used lease=1 upto=2)] step=1
            ForgetLoss
            WaitBefore stand='at the barrier'
        """,
        shows_own_data=True,
    )


def test_what_is_leased_lasts_ten_minutes_of_steps_without_a_coordinator() -> None:
    """Its line was cut for 25 s, and one peer of four stood still after 17 steps."""
    player, held, reached, batch, step_s = Player(), list[Lease](), 0, 4, 0.05
    player("rules blocking 1000000"), player("begin")
    for _ in range(500):
        effects = player.machine.on_want(10_000_000, batch, player.now)
        said = [each.word for each in effects if isinstance(each, do.SayWord)]
        for need in [word for word in said if isinstance(word, NeedSamples)]:
            held.append(Lease.at(len(held) + 1, 0, reached, reached + need.want, (reached,)))
            reached += need.want
            player.machine.on_message(LeasesNow(leases=tuple(held)), player.now)
            effects = effects if any(isinstance(each, do.ReadSamples) for each in effects) else []
        if not effects:
            effects = player.machine.on_want(10_000_000, batch, player.now)
        [read] = [each for each in effects if isinstance(each, do.ReadSamples)]
        player.machine.hand_out((read.span, *read.more), 0)
        player.now += step_s
        player("step 1")
    left = reached - 500 * batch
    assert left / batch * step_s >= 0.95 * AHEAD_S
    assert len(held) <= 6


class Reader:
    """A peer that reads a stream of unknown length; `reached` is what was leased of it to anybody."""

    def __init__(self) -> None:
        self.player, self.held = Player(), list[Lease]()
        self.player("rules blocking 10"), self.player("begin")

    def reads(self, batch: int, reached: int, first_id: int) -> tuple[do.ReadSamples, int]:
        """Its next batch, and how much is leased now."""
        machine, now = self.player.machine, self.player.now
        while True:
            read: do.ReadSamples | None = None
            for effect in machine.on_want(UNKNOWN_LENGTH, batch, now):
                if isinstance(effect, do.ReadSamples):
                    read = effect
                elif isinstance(effect, do.SayWord) and isinstance(effect.word, NeedSamples):
                    stop = reached + effect.word.want
                    self.held.append(Lease.at(first_id + len(self.held), 0, reached, stop, (reached,)))
                    reached = stop
            machine.on_message(LeasesNow(leases=tuple(self.held)), now)
            if read is not None:
                return read, reached

    def learns(self, read: do.ReadSamples) -> None:
        self.player.machine.hand_out((read.span, *read.more), 0)
        self.player.now += 0.0025
        self.player.machine.on_step(self.player.now, (1,))


def test_two_peers_share_a_short_stream_however_fast_they_read_at_first() -> None:
    """One had leased 241,056 of 2,000 samples, at the pace of its first batches, and the other never took a step."""
    readers, reached, batch, length = [Reader(), Reader()], 0, 8, 2000
    taken = [0, 0]
    for _ in range(240):
        for at, reader in enumerate(readers):
            read, reached = reader.reads(batch, reached, 100 * at)
            if read.span.start < length:
                taken[at] += batch
            reader.learns(read)
        if sum(taken) >= 960:
            break
    assert reached < length and 0.4 < taken[0] / sum(taken) < 0.6, (reached, taken)


def test_who_reads_fast_at_first_and_then_hardly_holds_a_small_part_of_a_stream_back_from_the_others() -> (
    None
):
    """What it holds it keeps while it is here: so it never holds much, and nothing has to be taken from it."""
    readers, reached, batch, length, furthest = [Reader(), Reader()], 0, 8, 20_000, [0, 0]
    for turn in range(length // batch):
        for at in (0, 1) if turn < 200 else (1,):
            read, reached = readers[at].reads(batch, reached, 1000 * at)
            furthest[at] = max(read.span.stop, *(span.stop for span in read.more), 0)
            readers[at].learns(read)
        if turn == 199:
            held = readers[0].held
            back = sum(max(0, lease.stop - max(lease.start, furthest[0])) for lease in held)
            assert back <= max(2 * 256, reached / 16) + batch, (back, reached)
        if reached >= length:
            break
    mine = sum(lease.stop - lease.start for lease in readers[1].held)
    assert reached >= length and mine >= length - 200 * batch - 2 * 256 - batch, (mine, reached)
