"""A joiner takes the state of a donor's optimizer: the same steps follow, and nothing that is not one gets in."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from farflung.collectives.digests import hash_bytes
from farflung.collectives.effects import SendFrame
from farflung.collectives.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.collectives.verdicts import Counters, Verdict
from farflung.coordinator.manifest import Manifest
from farflung.optim.inner import muon
from farflung.peer import effects as do
from farflung.peer.donating import FRESH_S, MAKE_EVERY_S, MAKING_MOST_S, UNUSED_S, Donating
from farflung.peer.donor import Donor
from farflung.peer.heir import Heir
from farflung.peer.identity import Identity
from farflung.peer.inheriting import ANSWER_S, ASKED_AT_ONCE, DESCRIPTION, Inheriting, Wanted
from farflung.peer.inner_loop import InnerLoop
from farflung.peer.inner_state import InnerState, NotTaken
from farflung.peer.inner_words import InnerWords
from farflung.peer.local import SharedState
from farflung.peer.local_messages import (
    Frozen,
    InnerHere,
    InnerKept,
    InnerTaken,
    KeepInner,
    Load,
    TakeInner,
    WantInner,
    from_trainer,
    to_bytes,
    to_trainer,
)
from farflung.peer.optimizer import RunOptimizer
from farflung.peer.serving import Serving, is_heavy

MOST = 1 << 20
Make = Callable[[nn.Module], Optimizer]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)).to(dtype)


def learn(model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


MAKES: dict[str, Make] = {
    "adamw": lambda m: AdamW(m.parameters(), 1e-2),
    "amsgrad": lambda m: AdamW(m.parameters(), 1e-2, amsgrad=True),
    "sgd": lambda m: SGD(m.parameters(), 1e-2, momentum=0.9),
    "muon": lambda m: muon(m, 1e-2),
    "a rate that is a tensor": lambda m: AdamW(m.parameters(), torch.tensor(1e-2), foreach=False),
}


@pytest.fixture
def donor_file(tmp_path: Path) -> Path:
    model = net()
    optimizer = MAKES["adamw"](model)
    learn(model, optimizer, 3)
    InnerState(optimizer, model).write(tmp_path / "out", MOST)
    return tmp_path / "out"


# ---- the state as a file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKES)
def test_with_a_donors_state_the_same_steps_follow(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    donor, joiner = net(dtype), net(dtype)
    theirs, mine = MAKES[name](donor), MAKES[name](joiner)
    learn(donor, theirs, 3)
    size = InnerState(theirs, donor).write(tmp_path / "out", MOST)
    assert size == (tmp_path / "out").stat().st_size
    joiner.load_state_dict(donor.state_dict())
    before = [p.clone() for p in joiner.parameters()]
    state = InnerState(mine, joiner)
    assert state.expect() >= size and not mine.state
    state.take(tmp_path / "out")
    assert all(map(torch.equal, before, joiner.parameters())) and all(
        p.grad is None for p in joiner.parameters()
    )
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    learn(donor, theirs, 2, seed=7)
    learn(joiner, mine, 2, seed=7)
    assert all(map(torch.equal, donor.parameters(), joiner.parameters()))


def test_parameters_go_by_their_names_and_those_without_gradients_have_no_state(tmp_path: Path) -> None:
    donor, joiner = net(), net()
    theirs = AdamW(reversed(list(donor.parameters())), 1e-2)
    donor[0].requires_grad_(False)
    learn(donor, theirs, 2)
    for p in donor[0].parameters():
        theirs.state.pop(p, None)
    InnerState(theirs, donor).write(tmp_path / "out", MOST)
    mine = AdamW(joiner.parameters(), 1e-2)
    InnerState(mine, joiner).take(tmp_path / "out")
    assert set(mine.state) == set(joiner.parameters()) - set(joiner[0].parameters())
    for a, b in zip(donor[1].parameters(), joiner[1].parameters(), strict=True):
        assert torch.equal(theirs.state[a]["exp_avg"], mine.state[b]["exp_avg"])


def test_who_has_nothing_gives_nothing_and_says_so(tmp_path: Path) -> None:
    model = net()
    fresh = AdamW(model.parameters())
    with pytest.raises(NotTaken, match="no state yet"):
        InnerState(fresh, model).write(tmp_path / "out", MOST)
    with pytest.raises(NotTaken, match="keeps no state"):
        InnerState(SGD(model.parameters(), 1e-2), model).expect()
    learn(model, fresh, 1)
    with pytest.raises(NotTaken, match="bytes"):
        InnerState(fresh, model).write(tmp_path / "out", 100)
    with pytest.raises(NotTaken, match="a state already"):
        InnerState(fresh, model).expect()
    fresh.state[next(model.parameters())]["hook"] = print
    with pytest.raises(NotTaken, match="builtin_function"):
        InnerState(fresh, model).write(tmp_path / "out", MOST)


KEY = "1.weight/exp_avg"


def _set(key: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: value(tensors[key])})


SPOILT: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "not finite": _set(KEY, lambda t: t / 0),
    "of another shape": _set(KEY, lambda t: t[:2].clone()),
    "of another dtype": _set(KEY, lambda t: t.double()),
    "a mean of squares below zero": _set("1.weight/exp_avg_sq", lambda t: -t),
    "a count below zero": _set("1.weight/step", lambda t: t - 30),
    "without a key": lambda tensors: tensors.pop(KEY),
    "with a key more": lambda tensors: tensors.update({"1.weight/more": torch.ones(1)}),
    "of another model": lambda tensors: tensors.update({"9.weight/exp_avg": torch.ones(1)}),
    "empty": lambda tensors: tensors.clear(),
}


@pytest.mark.parametrize("name", SPOILT)
def test_P8_a_state_that_is_not_like_mine_is_not_taken(donor_file: Path, name: str) -> None:
    with safe_open(donor_file, "pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    SPOILT[name](tensors)
    save_file(tensors, donor_file)
    _is_refused(donor_file)


def _head(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def spoil(raw: bytes) -> bytes:
        size = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8 : 8 + size])
        change(head)
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + size :]

    return spoil


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda raw: raw[:-5],
    "longer": lambda raw: raw + b"more",
    "nothing": lambda raw: b"",
    "noise": lambda raw: hash_bytes(raw) * 40,
    "a pickle": lambda raw: pickle.dumps({"state": {}}),
    "a head without end": lambda raw: (1 << 60).to_bytes(8, "little") + raw[8:],
    "numbers that are no table": _head(lambda h: h["__metadata__"].update(numbers="[1]")),
    "numbers that are no JSON": _head(lambda h: h["__metadata__"].update(numbers="{")),
    "a number that is not finite": _head(
        lambda h: h["__metadata__"].update(numbers='{"1.weight/step": 1e999}')
    ),
    "a number where a tensor is": _head(lambda h: h["__metadata__"].update(numbers='{"1.weight/step": 3}')),
    "places outside": _head(lambda h: h[KEY].update(data_offsets=[0, 1 << 50])),
}


@pytest.mark.parametrize("name", BYTES)
def test_P8_damaged_and_foreign_files_are_not_taken(donor_file: Path, name: str) -> None:
    donor_file.write_bytes(BYTES[name](donor_file.read_bytes()))
    _is_refused(donor_file)


def _is_refused(path: Path) -> None:
    model = net()
    optimizer = MAKES["adamw"](model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NotTaken):
        InnerState(optimizer, model).take(path)
    assert not optimizer.state and all(map(torch.equal, before, model.parameters()))
    learn(model, optimizer, 1)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# ---- when a donor makes a copy ------------------------------------------------------------------------------------


def test_P8_who_asks_without_end_makes_no_donor_copy_without_end() -> None:
    policy, made = Donating(), 0
    for second in range(1000):
        now = float(second)
        if policy.copy is None and policy.may_ask(now):
            assert policy.made(policy.make(now), 1000, now)
            made += 1
        if policy.is_over(now):
            policy.drop()
    assert made <= 1000 / MAKE_EVERY_S + 1


def test_a_copy_is_shared_grows_old_and_is_given_to_nobody_twice_over() -> None:
    policy = Donating()
    number = policy.make(0.0)
    assert not policy.give("ann", number, 10, 0.5), "it is being made"
    assert policy.made(number, 100, 1.0) and not policy.made(number, 100, 1.0)
    assert policy.may_ask(2.0) and not policy.may_ask(1.0 + FRESH_S)
    assert not policy.give("ann", number + 1, 10, 2.0)
    given = sum(policy.give("mal", number, 10, 2.0) for _ in range(100))
    assert given == 21 and policy.give("ann", number, 10, 2.0)
    assert not policy.is_over(2.0 + UNUSED_S - 1) and policy.is_over(2.0 + UNUSED_S)
    slow = Donating()
    slow.make(0.0)
    assert slow.is_over(MAKING_MOST_S)


# ---- how a joiner fetches it --------------------------------------------------------------------------------------

RUN = b"r" * 32
STATE = bytes(range(250)) * 5
PIECE = 200
PIECES = -(-len(STATE) // PIECE)


class Giver:
    """A donor's agent, or one that pretends."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.id = self.identity.peer_id
        self.said: dict[str, Any] = {}

    def describe(self, **other: Any) -> Frame:
        from msgspec import msgpack, structs

        from farflung.peer.inheriting import Description

        said = Description(size=len(STATE), digest=hash_bytes(STATE), public=self.identity.public)
        said = structs.replace(said, signature=self.identity.sign(said.statement(RUN)))
        raw = msgpack.encode(structs.replace(said, **other))
        return with_payload(Header(Kind.INNER, RUN[:8], decision_no=DESCRIPTION, version=4), raw)

    def piece(self, number: int) -> Frame:
        raw = STATE[number * PIECE : (number + 1) * PIECE]
        return with_payload(Header(Kind.INNER, RUN[:8], version=4, chunk=number), raw)

    def word(self, kind: Kind, version: int, chunk: int) -> Frame:
        return Frame(Header(kind, RUN[:8], decision_no=int(Kind.WANT_INNER), version=version, chunk=chunk))


def heir_of(*givers: Giver, limit_s: float = 100.0) -> Inheriting:
    wanted = Wanted(RUN, MOST, PIECE, until=limit_s)
    return Inheriting(wanted, tuple(giver.id for giver in givers), 0.0)


def asked(heir: Inheriting, now: float) -> list[tuple[str, int, int]]:
    return [(e.to, e.frame.header.version, e.frame.header.chunk) for e in heir.ask(now)]


def test_one_donor_gives_it_in_pieces_a_few_at_a_time() -> None:
    ann = Giver()
    heir, got, now = heir_of(ann), bytearray(len(STATE)), 0.0
    assert asked(heir, 0.0) == [(ann.id, 0, 0)] and asked(heir, 0.1) == []
    assert heir.on_frame(ann.id, ann.describe(), 0.2) == (Verdict.ACCEPTED, None)
    waiting: list[int] = []
    while not heir.is_whole:
        now += 1.0
        waiting += [chunk for _, version, chunk in asked(heir, now) if version == 4]
        assert 0 < len(waiting) <= ASKED_AT_ONCE
        verdict, piece = heir.on_frame(ann.id, ann.piece(waiting.pop()), now)
        assert verdict == Verdict.ACCEPTED and piece is not None
        got[piece.at : piece.at + len(piece.payload)] = piece.payload
    assert got == STATE and asked(heir, now) == []
    assert heir.on_frame(ann.id, ann.piece(0), now)[0] == Verdict.STALE


def test_who_has_none_or_says_nothing_is_passed_over_and_then_it_is_one_donor_alone() -> None:
    ann, bob, cid = Giver(), Giver(), Giver()
    heir = heir_of(ann, bob, cid)
    assert asked(heir, 0.0)[0][0] == ann.id
    heir.on_frame(ann.id, ann.word(Kind.MISSING, 0, 0), 0.1)
    assert asked(heir, 0.2)[0][0] == bob.id
    heir.on_frame(bob.id, bob.word(Kind.LATER, 0, 0), 5.0)
    asked(heir, 5.0 + ANSWER_S - 1)
    assert heir.donor == bob.id, "it said later"
    assert asked(heir, 5.0 + ANSWER_S)[0][0] == cid.id
    heir.on_frame(cid.id, cid.describe(), 16.0)
    assert len(asked(heir, 16.0)) == ASKED_AT_ONCE
    heir.on_frame(cid.id, cid.word(Kind.MISSING, 4, 0), 17.0)
    assert "none to give" in heir.problem and asked(heir, 18.0) == []


@pytest.mark.parametrize(
    "spoil",
    [
        {"digest": bytes(32)},
        {"size": 7},
        {"public": Identity.generate().public},
        {"signature": b""},
        {"size": -1},
    ],
)
def test_P8_what_the_donor_did_not_sign_is_not_believed(spoil: dict[str, Any]) -> None:
    ann = Giver()
    heir = heir_of(ann)
    asked(heir, 0.0)
    assert heir.on_frame(ann.id, ann.describe(**spoil), 0.1)[0] == Verdict.MALFORMED
    assert "not signed" in heir.problem


def test_P8_more_than_mine_can_take_and_pieces_of_another_length_end_it() -> None:
    ann, mal = Giver(), Giver()
    small = Inheriting(Wanted(RUN, len(STATE) - 1, PIECE, 100.0), (ann.id,), 0.0)
    small.ask(0.0)
    assert small.on_frame(ann.id, ann.describe(), 0.1)[0] == Verdict.OVERSIZE and small.problem
    heir = heir_of(ann)
    asked(heir, 0.0)
    assert heir.on_frame(ann.id, ann.piece(0), 0.1)[0] == Verdict.STALE, "nothing was described yet"
    heir.on_frame(ann.id, ann.describe(), 0.1)
    asked(heir, 0.2)
    assert heir.on_frame(mal.id, ann.piece(0), 0.3)[0] == Verdict.STALE, "it was not asked"
    assert heir.on_frame(ann.id, ann.piece(PIECES - 1), 0.3)[0] == Verdict.STALE, "nor was this piece"
    short = with_payload(Header(Kind.INNER, RUN[:8], version=4, chunk=0), b"short")
    assert heir.on_frame(ann.id, short, 0.3)[0] == Verdict.MALFORMED and heir.problem


def test_the_time_is_limited_whatever_the_donor_says() -> None:
    ann = Giver()
    heir = heir_of(ann, limit_s=30.0)
    for second in range(40):
        heir.ask(float(second))
        heir.on_frame(ann.id, ann.word(Kind.LATER, 0, 0), float(second))
        assert heir.over == (second >= 30)
    assert heir.problem == "it did not come in time"
    alone = heir_of()
    assert alone.over and alone.ask(0.0) == []
    spoiled = heir_of(ann)
    spoiled.ask(0.0)
    spoiled.on_spoiled(ann.id, 0.1)
    assert spoiled.over


# ---- both hands ---------------------------------------------------------------------------------------------------


class Pair:
    """A donor's hand and a joiner's, frames carried from one to the other; jobs are done at once."""

    def __init__(self, folder: Path, limit_s: float = 100.0) -> None:
        self.told: list[object] = []
        self.now = 0.0
        self.spoil: Callable[[Frame], Frame] = lambda frame: frame
        identity = Identity.generate()
        self.donor = Donor(identity, self.submit, self.carry)
        self.donor.begin(RUN, self._folder(folder / "donor"), 1000, PIECE)
        self.heir = Heir(self.submit, self.carry)
        lane = SimpleNamespace(catch=SimpleNamespace(donors_by_speed=(identity.peer_id,)))
        part = SimpleNamespace(lanes=[lane], counters=Counters())
        machine: Any = SimpleNamespace(part=part, doorway=SimpleNamespace(run_id=RUN))
        self.heir.begin(machine, limit_s, self._folder(folder / "heir"), PIECE)
        self.me = identity.peer_id
        self.questions: list[SendFrame] = []

    @staticmethod
    def _folder(path: Path) -> Path:
        path.mkdir()
        return path

    @staticmethod
    def submit(job: Callable[[], object], then: Callable[[object], None]) -> None:
        then(job())

    def carry(self, effects: list[do.Effect]) -> None:
        self.questions += [effect for effect in effects if isinstance(effect, SendFrame)]
        self.told += [
            e.message if isinstance(e, do.Tell) else e for e in effects if not isinstance(e, SendFrame)
        ]

    def turn(self) -> None:
        questions, self.questions = self.questions, []
        for question in questions:
            header = question.frame.header
            self.donor.on_question(header, self.now)
            if not self.donor.can(header):
                self.questions.append(question)
                continue
            made = self.donor.answer("joiner", header, self.now)
            frame = made if isinstance(made, Frame) else made()
            assert self.heir.takes(self.me, self.spoil(frame), self.now)
        self.now += 0.1
        self.heir.on_tick(self.now)
        self.donor.on_tick(self.now)

    def run(self, keep: Callable[[KeepInner], InnerKept]) -> InnerHere:
        self.heir.on_wanted(MOST, self.now)
        for _ in range(2000):
            self.turn()
            for message in [m for m in self.told if isinstance(m, KeepInner)]:
                self.told.remove(message)
                self.donor.on_kept(keep(message), lambda: self.now)
            here = [m for m in self.told if isinstance(m, InnerHere)]
            if here:
                return here[0]
        raise AssertionError("the trainer would wait for ever")


def written(asked: KeepInner) -> InnerKept:
    Path(asked.path).write_bytes(STATE)
    return InnerKept(number=asked.number, size=len(STATE), took_s=0.1)


def test_a_copy_goes_from_a_donor_to_a_joiner_and_no_file_stays(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    here = pair.run(written)
    assert not here.problem and Path(here.path).read_bytes() == STATE and pair.heir.waiting
    pair.heir.on_taken(InnerTaken(), pair.now)
    assert not pair.heir.waiting
    for _ in range(10 * int(UNUSED_S) + 10):
        pair.turn()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    notes = [m.text for m in pair.told if isinstance(m, do.Note)]
    assert len(notes) == 2 and "goes on with the optimizer's state" in notes[1], notes


@pytest.mark.parametrize(
    "keep",
    [
        lambda asked: InnerKept(number=asked.number, size=0, took_s=0.0, problem="no state yet"),
        lambda asked: InnerKept(number=asked.number + 1, size=0, took_s=0.0),
    ],
    ids=["has none", "never comes"],
)
def test_without_a_copy_the_joiner_starts_fresh_and_in_time(
    tmp_path: Path, keep: Callable[[KeepInner], InnerKept]
) -> None:
    pair = Pair(tmp_path, limit_s=20.0)
    here = pair.run(keep)
    assert here.problem and pair.now <= 20.2
    pair.heir.on_taken(InnerTaken(problem=here.problem), pair.now)
    assert not pair.heir.waiting and any(
        "fresh optimizer" in m.text for m in pair.told if isinstance(m, do.Note)
    )


def test_P8_bytes_that_are_not_what_the_donor_signed_are_not_shown_to_the_trainer(tmp_path: Path) -> None:
    def spoil(frame: Frame) -> Frame:
        if frame.header.decision_no or frame.header.chunk != 2:
            return frame
        return with_payload(frame.header, bytes(len(frame.payload)))

    pair = Pair(tmp_path)
    pair.spoil = spoil
    assert "not what the donor signed" in pair.run(written).problem


def test_a_damaged_frame_and_unasked_ones_do_no_harm(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    header = Header(Kind.INNER, RUN[:8], version=1)
    assert pair.heir.takes("mal", with_payload(header, b"x"), 0.0), "nobody asked"
    assert pair.heir.takes("mal", Spoiled(Verdict.BAD_HASH, header), 0.0)
    assert not pair.heir.takes(
        "ann", Frame(Header(Kind.MISSING, RUN[:8], decision_no=int(Kind.WANT_STATE))), 0.0
    )
    pair.heir.on_wanted(MOST, 0.0)
    pair.heir.takes(pair.me, Spoiled(Verdict.BAD_HASH, header), 0.0)
    assert any(isinstance(m, InnerHere) and m.problem for m in pair.told)


def test_pieces_wait_for_rounds_as_the_runs_state_does_and_a_description_does_not() -> None:
    describe, piece = (Header(Kind.WANT_INNER, RUN[:8], version=v) for v in (0, 1))
    assert is_heavy(piece) and not is_heavy(describe) and is_heavy(Header(Kind.WANT_STATE, RUN[:8]))
    serving = Serving(fragments=1)
    held = [
        serving.hold("mal", Frame(Header(Kind.WANT_INNER, RUN[:8], version=1, chunk=c)), 0.0)
        for c in range(99)
    ]
    assert sum(held) == serving.most


# ---- in the trainer -----------------------------------------------------------------------------------------------


MANIFEST = Manifest.model_validate({"round": {"sync_every": 3, "chunk_kb": 1}})


def load(version: int, keep: str = "drop") -> Load:
    return Load(version=version, keep=keep, slot=0, tokens=0, steps=0, spare=0)  # type: ignore[arg-type]


class Words:
    """An inner loop with an optimizer, whose agent is a test: what it will say waits in `coming`."""

    def __init__(self, folder: Path, *messages: object) -> None:
        self.model = nn.Linear(4, 3)
        self.coming: deque[object] = deque()
        self.all_said: list[object] = []
        self.loop = loop = InnerLoop(self, self.model, MANIFEST)  # type: ignore[arg-type]
        self.inner = AdamW(self.model.parameters(), 1.0)
        self.optimizer = RunOptimizer(self.inner, loop.after_step, loop.before_step)
        loop.inner = InnerWords(self.optimizer, InnerState(self.inner, self.model), MANIFEST.inner, self.send)
        folder.mkdir(exist_ok=True)
        shared = SharedState.create(folder, loop.layout.total_elements)
        self.coming += [shared.as_message(), *messages]
        loop.attach()
        self.said = [m for m in self.all_said if isinstance(m, WantInner | InnerTaken)]

    def send(self, message: Any) -> None:
        self.all_said.append(from_trainer(to_bytes(message)))
        if isinstance(message, Frozen):
            self.coming.append(load(6, "rest"))

    def recv(self, timeout_s: float) -> Any:
        return to_trainer(to_bytes(self.coming.popleft())) if self.coming else None  # type: ignore[arg-type]

    def sizes(self, steps: int) -> list[float]:
        """Of the next steps, as far as the rate goes."""
        seen: list[float] = []
        self.inner.register_step_pre_hook(lambda *_: seen.append(self.inner.param_groups[0]["lr"]))
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            assert self.inner.param_groups[0]["lr"] == 1.0
        return seen


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    model = nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), 1.0)
    learn(model, optimizer, 3)
    InnerState(optimizer, model).write(tmp_path / "out", MOST)
    return tmp_path / "out"


def test_the_default_is_a_fresh_optimizer_with_small_first_steps(tmp_path: Path) -> None:
    joiner = Words(tmp_path, load(5))
    assert joiner.said == []
    assert joiner.sizes(11) == [pytest.approx(n / 10) for n in range(1, 11)] + [1.0]


def test_who_founds_the_run_takes_whole_steps_and_asks_nobody(tmp_path: Path) -> None:
    founder = Words(tmp_path, TakeInner(), load(0))
    assert founder.said == [] and founder.sizes(1) == [1.0]


def test_a_joiner_waits_takes_it_and_takes_whole_steps(tmp_path: Path, learned: Path) -> None:
    joiner = Words(tmp_path / "j", TakeInner(), load(5), load(6, "all"), InnerHere(path=str(learned)))
    assert [type(word) for word in joiner.said] == [WantInner, InnerTaken] and joiner.said[1] == InnerTaken()
    assert joiner.loop.version == 6, "the run went on meanwhile"
    assert joiner.sizes(1) == [1.0]
    assert {float(kept["step"]) for kept in joiner.inner.state.values()} == {4.0}


def test_without_one_the_first_steps_are_small_and_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    joiner = Words(tmp_path / "a", TakeInner(), load(5), InnerHere(problem="it fell silent"))
    assert joiner.said[-1] == InnerTaken(problem="it fell silent") and joiner.sizes(1) == [pytest.approx(0.1)]
    (tmp_path / "none").write_bytes(b"none")
    other = Words(tmp_path / "b", TakeInner(), load(5), InnerHere(path=str(tmp_path / "none")))
    assert isinstance(other.said[-1], InnerTaken) and other.said[-1].problem
    assert not other.inner.state and other.sizes(1) == [pytest.approx(0.1)]


def test_work_that_had_to_go_takes_a_donors_state_with_it(tmp_path: Path, learned: Path) -> None:
    for name, before, kept in (("a", [], 0), ("b", [load(6, "rest")], 2)):
        joiner = Words(tmp_path / name, TakeInner(), load(5), InnerHere(path=str(learned)))
        for word in (*before, load(6)):
            joiner.loop._handle(word)
        assert len(joiner.inner.state) == kept


def test_a_donor_writes_its_state_between_two_steps(tmp_path: Path) -> None:
    donor = Words(tmp_path, load(0))
    donor.coming.append(KeepInner(number=3, path=str(tmp_path / "out"), most_bytes=MOST))
    donor.sizes(1)
    donor.coming.append(KeepInner(number=4, path="/nowhere/at/all", most_bytes=MOST))
    donor.sizes(1)
    good, bad = [m for m in donor.all_said if isinstance(m, InnerKept)]
    assert good.number == 3 and good.size == (tmp_path / "out").stat().st_size and not good.problem
    assert bad.problem == "no room for a copy: No such file or directory"
