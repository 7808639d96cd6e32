"""A hostile host writes something into each key of a manifest: what its volunteer's machine opens, allocates, runs and
says because of it.  Real classes in this process; benchmarks/hostile_host.py does the same with real processes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save

from farflung.compression.codec import check_payload, payload_bytes
from farflung.optim.recipes import inner_of
from farflung.peer.builtin import trainer
from farflung.peer.builtin.llama import Llama
from farflung.peer.footprint import FreeMemory
from farflung.peer.local.words import Provided
from farflung.peer.machine import effects as do
from farflung.peer.machine.handshake import Me, PeerConfig
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.settings import default_cache
from farflung.peer.state.checkpoint_thread import StartJobs
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol import messages
from farflung.protocol.errors import FarflungError
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.messages import KINDS, Challenge, FragmentTick, Tick, Welcome
from farflung.protocol.states import Goal
from rig.hostile_manifests import HOSTILE, MARK, cases, keys, private_home

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What a manifest can make your machine do")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`\[.*?) \| .* \| (`tests/.*?) \|$", TABLE, re.M)
ME = Me("ann", "ann", b"i" * 32, b"k" * 32, b"p" * 16, "test", lambda message: b"s" * 64)
RUN_ID, SESSION, FREE = bytes(range(16)), bytes(16), 4e9
SIZE = ModelSection(layers=1, width=8, heads=2, context=8)


def named(row: str) -> set[str]:
    """`[model] layers`, `width` names model.layers and model.width; `[merge]` alone all of its keys."""
    found: set[str] = set()
    for section, key, more in re.findall(r"`\[(\w+)\] ?(\w*)`((?:, `\w+`)*)", row):
        of_section = {each for each in keys() if each.startswith(f"{section}.")}
        wanted = [key, *re.findall(r"`(\w+)`", more)] if key else []
        found |= {f"{section}.{each}" for each in wanted} if wanted else of_section
    return found


def test_each_key_of_a_manifest_has_one_row_of_the_page_and_hostile_values() -> None:
    told = [key for row, _ in ROWS for key in named(row)]
    assert len(told) == len(set(told)), "a key stands in two rows"
    assert set(told) == keys() == set(HOSTILE)
    assert len(ROWS) == TABLE.count("\n| ") - 1, "a row that cannot be read"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights fit the model that the volunteer's script has."""
    model = Llama(SIZE, 7)
    weights = {name: each.clone() for name, each in model.state_dict().items() if name != "lm_head.weight"}
    return private_home(tmp_path_factory.mktemp("victim"), save(weights))


class Watched:
    def __init__(self) -> None:
        self.opened: list[str] = []
        self.run: list[str] = []
        self.on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str):
            self.opened.append(arguments[0])
        if event in (
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "pickle.find_class",
            "os.fork",
        ):
            self.run.append(f"{event} {arguments[:2]}")


@pytest.fixture(scope="module")
def watched() -> Watched:
    made = Watched()
    sys.addaudithook(made)
    return made


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    watched.opened.clear()
    watched.run.clear()
    watched.on = True
    try:
        yield
    finally:
        watched.on = False


class Volunteer:
    """The machine of a peer, with the hands that a manifest can move; all that it says is kept as it travels."""

    def __init__(self, start: str = "") -> None:
        self.said: list[bytes] = []
        self.told: list[str] = []
        config = PeerConfig(ME, "my-run", check_payload, payload_bytes, start=start)
        self.machine = PeerMachine(config, lambda: 0.5)
        self.jobs: list[do.BeginFrom] = []

    def carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.ToDoor(message=message) | do.ToCoordinator(message=message):
                    self.said.append(messages.encode(message))
                case do.Note(text=text):
                    self.told.append(text)
                case do.Exit(reason=reason):
                    self.told.append(reason)
                case do.BeginFrom():
                    self.jobs.append(effect)

    def joins(self, raw: bytes) -> None:
        """As far as being told to found the run, and to read what it begins with."""
        machine = self.machine
        self.carry_out(machine.on_timer(0.0))
        self.carry_out(
            machine.on_door(
                Challenge(nonce=bytes(32), run_id=RUN_ID, manifest=raw, protocol=PROTOCOL_VERSION), 0.0
            )
        )
        if machine.member.leaving.exited or machine.known is None:
            return
        model = Llama(SIZE, 1)
        manifest = machine.known.manifest
        layout = ModelLayout.of(model, 1024)
        schema = layout.model_schema(model)
        if manifest.pipeline.stages > 1 or len(schema.fragments(manifest.fragments)) != manifest.fragments:
            return
        self.carry_out(machine.on_attach(schema, "127.0.0.1:1", 0.0))
        fragments = tuple(range(manifest.fragments))
        self.carry_out(machine.on_door(
            Welcome(session=SESSION, incarnation=1, member_port=4000, fragments=fragments, roster=(),
                    whereabouts=b""), 1.0
        ))  # fmt: skip
        words = tuple(FragmentTick(each, 0, (), False, (), 0, False, 0) for each in fragments)
        self.carry_out(machine.on_control(Tick(
            session=SESSION, seq=1, answers=1, heard_s=0.0, fragments=words, goal=Goal.FOUND, reason="", roster_no=0,
            roster=None, leases=None, void=(), era=0, advice="", era_because="",
        ), 2.0))  # fmt: skip
        for job in self.jobs:
            self._read(job)
        self.carry_out(machine.on_local(Provided(), 3.0))
        self.carry_out(machine.member.take_leave("the owner's own sentence", 4.0))
        self.carry_out(machine.on_timer(1e6))

    def _read(self, job: do.BeginFrom) -> None:
        joined, over = self.machine.member.joined, threading.Event()
        assert joined is not None
        state = SimpleNamespace(clear=lambda: None, place=lambda *_: None)
        inbox: list[Any] = []

        def submit(act: Any, then: Any) -> None:
            inbox.append((act, then))
            then(act())

        def tell(effects: list[do.Effect]) -> None:
            self.carry_out(effects)
            over.set()

        hand = StartJobs(joined.attached, self.machine.member, submit, tell)
        hand.begin(job, state, lambda: 3.0)  # type: ignore[arg-type]
        assert over.wait(30.0), job
        hand.close()


def trains(raw: bytes, connection: list[Any]) -> str:
    """What the built-in trainer makes of it, up to its first step; a refusal in its words."""
    manifest = Manifest.from_canonical(raw)
    connection[:] = [SimpleNamespace(manifest=manifest, abandon=lambda: None, agent=None)]
    try:
        trainer._shape_here(connection[0])
        trainer.windows_of(manifest)
        inner_of(manifest, Llama(SIZE, 1))
    except (FarflungError, ImportError) as error:
        return str(error)
    return ""


def test_the_volunteer_of_these_tests_goes_as_far_as_a_real_one(
    home: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be shown: it says all of its words, its trainer reads, and a path of its owner's is opened."""
    plain = Volunteer()
    plain.joins(Manifest().canonical())
    kinds = {type(messages.decode(raw, frozenset(KINDS))).__name__ for raw in plain.said}
    assert kinds == {"Knock", "Hello", "Beat", "Leave"}, kinds
    assert trains(Manifest().canonical(), []) == ""
    place = home / "private.safetensors"
    start = {"from": str(place), "hash": blake3(place.read_bytes()).hexdigest()}
    raw = Manifest.model_validate({"start": start}).canonical()
    stranger, owner = Volunteer(), Volunteer(start=str(place))
    with watching(watched):
        stranger.joins(raw)
    assert not stranger.jobs and not [each for each in watched.opened if "private" in each]
    with watching(watched):
        owner.joins(raw)
    assert owner.jobs and str(place) in watched.opened
    far = {"from": "https://127.0.0.1:9/a.safetensors", "hash": "0" * 64}
    reader = Volunteer()
    monkeypatch.setattr("farflung.checkpoints.files.AGAIN_AFTER_S", (0.0,))
    reader.joins(Manifest.model_validate({"start": far}).canonical())
    assert reader.jobs and any("can't begin with it now" in each for each in reader.told), reader.told


@pytest.mark.parametrize("key", sorted(HOSTILE))
def test_whatever_a_key_says_nothing_of_the_victim_is_opened_run_or_said(
    key: str, home: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "HOME": home,
        "FARFLUNG_HOME": tmp_path,
        "XDG_CACHE_HOME": tmp_path,
        "TMPDIR": tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(trainer, "room_on", lambda device: FreeMemory(None, FREE))
    monkeypatch.setattr("farflung.peer.data.token_shards.available_bytes", lambda: int(FREE))
    monkeypatch.setattr("farflung.peer.data.data_files.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("farflung.checkpoints.files.AGAIN_AFTER_S", (0.0,))
    private = blake3((home / "private.safetensors").read_bytes()).hexdigest()
    ours = (str(ROOT), sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev/shm", "/usr/lib", "/usr/share", "/lib",
            "/etc/ssl", str(tmp_path), str(default_cache({"XDG_CACHE_HOME": str(tmp_path)})))  # fmt: skip
    count = 0
    for case in cases(home, private, [key]):
        count += 1
        volunteer, problems = Volunteer(), list[str]()
        with watching(watched):
            try:
                volunteer.joins(case.content)
                problems.append(trains(case.content, []))
            except FarflungError as error:
                problems.append(str(error))
        beyond = [each for each in watched.opened if not each.startswith(ours)]
        assert not [each for each in watched.opened if each.startswith(str(home))], (case, watched.opened)
        assert not [each for each in beyond if each.startswith("/")], (case.content, beyond)
        assert not watched.run, (case, watched.run)
        whole = b"".join(volunteer.said)
        for secret in (
            MARK.encode(),
            private.encode(),
            bytes.fromhex(private),
            b"owner's own sentence",
            str(home).encode(),
        ):
            assert secret not in whole, (case, secret)
        assert all("\n" not in each for each in [*problems, *volunteer.told]), (
            case,
            problems,
            volunteer.told,
        )
    assert count >= len(HOSTILE[key]) > 0
    assert torch.is_grad_enabled()
