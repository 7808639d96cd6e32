"""The run machine on virtual time, with guests that say what each test has them say."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.coordinator.run.effects import AnswerDoor, Effect, Tell
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, RunSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Forward
from farflung.protocol.signed_words import hello_part
from rig.guests import Guest

RUN_ID = bytes(range(16))
MANIFEST = Manifest(run=RunSection(name="demo", min_peers=2, max_peers=4))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))


class Hall:
    def __init__(self, manifest: Manifest = MANIFEST) -> None:
        self.drawn, self.manifest = 0, manifest
        self.effects: list[Effect] = []  # of the last word at the door
        self.machine = RunMachine(manifest, RUN_ID, [], self.random)
        self.machine.start(0.0, 4000)

    def random(self, count: int) -> bytes:
        self.drawn += 1
        return hash_bytes(str(self.drawn).encode())[:count]

    def hello(self, guest: Guest, address: str = "host:1", helps: bool = False) -> m.ToDoor:
        knocked = self.machine.on_door(
            guest.key, guest.key, m.Knock(protocol=PROTOCOL_VERSION, run="demo", helps=helps), 0.0
        )
        [challenge] = [each.message for each in knocked if isinstance(each, AnswerDoor)]
        assert isinstance(challenge, m.Challenge)
        bare = m.Hello(
            protocol=PROTOCOL_VERSION, run_id=RUN_ID, identity=guest.identity, key=guest.key, address=address,
            software="test", manifest=self.manifest.digest, model=MODEL, fragments=(0,), version=-1, digest=b"",
            process=guest.process, token="", signature=b"", helps=helps,
        )  # fmt: skip
        signed = replace(bare, signature=guest.signer.sign(hello_part(bare, challenge.nonce)))
        self.effects = self.machine.on_door(guest.key, guest.key, signed, 0.0)
        [answer] = [each.message for each in self.effects if isinstance(each, AnswerDoor)]
        return answer

    def says(self, guest: Guest, message: m.FromMember) -> list[Effect]:
        return self.machine.on_member(guest.key, message, 0.0)

    def beat(
        self, guest: Guest, roster_no: int = 0, lacks_start: bool = False, forward: Forward | None = None
    ) -> m.Tick:
        told = self.told(guest, forward, roster_no, lacks_start)
        ticks = [each.message for each in told if isinstance(each, Tell) and each.peer == guest.peer]
        return next(tick for tick in ticks if isinstance(tick, m.Tick))

    def told(
        self, guest: Guest, forward: Forward | None, roster_no: int = 0, lacks_start: bool = False
    ) -> list[Effect]:
        """All that comes of a beat."""
        guest.seq += 1
        where = m.FragmentBeat(
            fragment=0, version=-1, digest=b"", round_no=0, epoch=0, decision_no=0, ready=False, need=()
        )
        beat = m.Beat(
            session=guest.session, seq=guest.seq, roster_no=roster_no, fragments=(where,), phase="inner", step=0,
            tokens=0, loss=None, tx_bytes=0, rx_bytes=0, up_bytes_per_s=0, down_bytes_per_s=0, have=(), want=0,
            samples=0, rough=False, era=0, saved=-1, unsure=False, leaving=False, data=b"",
            lacks_start=lacks_start, forward=forward,
        )  # fmt: skip
        return self.says(guest, beat)
