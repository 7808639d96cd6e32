"""Members that restart while they owe something: the first times are free, each further one costs twice as much."""

from __future__ import annotations

from farflung.coordinator.rounds.round import FORGIVEN, WINDOW, Steadiness
from farflung.protocol.limits import ROUNDS_KEPT


class Run:
    """Ann contributes to every commit that she may; her process has a number."""

    def __init__(self) -> None:
        self.steadiness = Steadiness()
        self.process = 0
        self.was_in = 0

    def commits(self, count: int = 1, with_ann: bool = True) -> None:
        for _ in range(count):
            ann = {"ann": bytes([self.process])} if with_ann and not self.out else {}
            self.was_in += len(ann)
            self.steadiness.on_commit(ann | {"bob": b"bob"})

    def restarts(self, in_round: bool = False) -> None:
        was = bytes([self.process]) if in_round else b""
        self.process += 1
        self.steadiness.comes("ann", bytes([self.process]), was)

    @property
    def out(self) -> int:
        return self.steadiness.rounds_out("ann")


def test_a_machine_that_crashes_now_and_then_is_counted_on() -> None:
    run = Run()
    for _ in range(20):
        run.commits(WINDOW // FORGIVEN)
        run.restarts()
        assert run.out == 0 and run.steadiness.counted_on(["ann", "bob"]) == {"ann", "bob"}


def test_who_restarts_after_every_commit_is_in_few_of_them() -> None:
    run = Run()
    for _ in range(WINDOW):
        run.commits()
        run.restarts()
    assert FORGIVEN < run.was_in <= 8
    assert run.steadiness.counted_on(["ann", "bob"]) == {"bob"}


def test_each_further_restart_costs_twice_as_many_rounds() -> None:
    run = Run()
    for _ in range(FORGIVEN):
        run.commits()
        run.restarts()
        assert run.out == 0
    for expected in (2, 4, 8):
        run.commits()
        run.restarts()
        assert run.out == expected
        run.commits(expected)
        assert run.out == 0


def test_who_restarts_in_the_middle_of_rounds_is_as_unsteady() -> None:
    run = Run()
    for _ in range(FORGIVEN + 1):
        run.restarts(in_round=True)
    assert run.out == 2


def test_a_restart_counts_once_however_often_its_new_process_says_hello() -> None:
    run = Run()
    for _ in range(FORGIVEN + 1):
        run.commits(ROUNDS_KEPT)
        run.restarts(in_round=True)
        for _ in range(5):
            run.steadiness.comes("ann", bytes([run.process]), bytes([run.process - 1]))
    assert run.out == 2


def test_who_owes_nothing_may_restart_as_often_as_it_likes() -> None:
    run = Run()
    for _ in range(20):
        run.commits(with_ann=True)
        run.commits(ROUNDS_KEPT, with_ann=False)
        run.restarts()
        run.restarts()
        assert run.out == 0


def test_a_reconnection_is_no_restart() -> None:
    run = Run()
    for _ in range(20):
        run.commits()
        run.steadiness.comes("ann", bytes([run.process]), bytes([run.process]))
    assert run.out == 0


def test_what_is_long_ago_is_forgotten() -> None:
    run = Run()
    for _ in range(FORGIVEN):
        run.commits()
        run.restarts()
    run.commits(WINDOW)
    run.restarts()
    assert run.out == 0
