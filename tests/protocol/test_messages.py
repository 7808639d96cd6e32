"""Control messages: nothing that arrives does more than end in its counter (P8).  Every bound, every kind."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.protocol import limits, messages
from farflung.protocol import messages as m
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.mode_words import (
    AheadBeat,
    AheadPlan,
    AheadTick,
    AskKept,
    AuditChunks,
    Audited,
    BatchBeat,
    BatchTick,
    ChunkVerdict,
    Complaint,
    DrawnChunk,
    EncodeTick,
    FiguresBeat,
    Keep,
    KeptBeat,
    KeptReceipts,
    Look,
    Meet,
    MeshReport,
    ReachBeat,
    ReachTick,
    RelayOffer,
    RelayOrder,
    ScoreBeat,
    ScoreTick,
    SeatRow,
    ServeTick,
    ShelfBeat,
    Shelved,
    StandsBy,
)
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec
from farflung.protocol.round_words import (
    SECTIONS_MOST,
    Commit,
    Contact,
    Decision,
    DotProducts,
    Forward,
    GroupSums,
    MeshColumn,
    Plan,
    RelayRoute,
    Used,
    section,
)
from farflung.protocol.signing import Amendment, KeptCommit, SignedHead

ALL = frozenset(m.KINDS)
H1, H2, SESSION = bytes([1]) * 32, bytes([2]) * 32, bytes(range(16))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
PLAN = Plan(7, 1, 3, ("ann", "bob"), (0, 1), ("fp32", "int8"))
DECISION = Decision(7, 1, (0.25, 0.75), {"cyd": "it was late"})
COMMIT = Commit(4, 7, ("ann", "bob"), (0.25, 0.75), H1 + H2, "fp32")
KEPT = KeptCommit(SignedHead(SESSION, H1, 3, H1, H2, 1, 0, (4,), (H1,), H2, bytes(96)), b"books")
TO = {"session": SESSION, "seq": 9}

DUE = BatchTick(
    3,
    0,
    64,
    96,
    16,
    2,
    ((0, 4), (8, 12)),
    False,
    b"\x01",
    9,
    (SeatRow(2, "ann", 1, 0.5, 4, 0),),
    b"\x04",
    (6,),
)
EXAMPLES: dict[str, m.Message] = {
    "knock": m.Knock(protocol=1, run="demo"),
    "hello": m.Hello(
        protocol=1,
        run_id=SESSION,
        identity=H1,
        key=H2,
        address="host:1",
        software="farflung",
        manifest=H1,
        model=MODEL,
        fragments=(0,),
        version=-1,
        digest=b"",
        process=SESSION,
        token="t",
        signature=bytes(64),
    ),
    "ask_status": m.AskStatus(run="demo"),
    "probe": m.Probe(padding=b"", want=0, address="", key=b"", look=True),
    "probed": m.Probed(came_from="10.0.0.1", wall_s=1.0, padding=b"", dialled="", port=40001),
    "challenge": m.Challenge(nonce=H1, run_id=SESSION, manifest=b"{}", protocol=limits.PROTOCOL_VERSION),
    "welcome": m.Welcome(
        session=SESSION,
        incarnation=1,
        member_port=4000,
        fragments=(0,),
        roster=(Contact("ann", "amber-fox", H1, "host:1"),),
        whereabouts=b"signed",
    ),
    "refuse": m.Refuse(code="full", reason="the run is full", retry_after_s=30.0),
    "stands_by": StandsBy(whereabouts=b"signed"),
    "status": m.StatusReply(status=b"{}"),
    "beat": m.Beat(
        **TO,
        roster_no=1,
        fragments=(m.FragmentBeat(0, 3, H1, 7, 1, 0, True, (4,), sections=(AheadBeat(9),)),),
        phase="scatter",
        step=12,
        tokens=4096,
        loss=2.5,
        tx_bytes=1,
        rx_bytes=2,
        up_bytes_per_s=1,
        down_bytes_per_s=0,
        have=(1, 2),
        want=64,
        samples=1000,
        rough=True,
        era=1,
        saved=20,
        unsure=True,
        leaving=True,
        data=H1[:16],
        lacks_start=True,
        forward=Forward(4, b"12345678", False, tuple(range(16))),
        sections=(
            BatchBeat(3, 2, 1, b"\x07", b"\x08", True, 0.5, 9, 4, 17, (Complaint(5, True),)),
            ScoreBeat(9, bytes(8), H1, "why", (48, 1 << 20)),
            FiguresBeat((("accuracy", 0.5), ("eval/f1-macro", -1e9))),
            ReachBeat(("bob",), RelayOffer(29803, 2_500_000, 3, 1, 0, 7000, 2, ""), ("cyd",)),
            ShelfBeat((Shelved(4, 0, b"1234"),)),
            KeptBeat(7),
        ),
    ),
    "sent": m.Sent(
        seat=2,
        counted=b"\x07",
        **TO,
        round_no=7,
        hashes=H1 + H2,
        tokens=10,
        steps=2,
        loss=None,
        used=(Used(1, 8),),
        signature=bytes(64),
    ),
    "progress": m.ProgressReport(
        **TO,
        round_no=7,
        decision_no=1,
        held={"ann": (b"\x01", H1)},
        refused={"bob": Verdict.BAD_HASH},
        cut_off=(),
        merged=b"\x01",
        merged_hashes=H1,
        got=b"\x03",
        got_hash=H2,
        dots=DotProducts(b"\x03", b"\x01", (1.0, 0.5, 2.0)),
        inputs=H1,
        signature=bytes(64),
        lengths=bytes(8),
        got_by={"ann": H1},
        held_since=4,
        sections=(
            MeshReport(
                GroupSums(b"\1", H1, H2, bytes(64)), DotProducts(b"\x03", b"\x01", (1.0, 0.5, 2.0)), bytes(16)
            ),
        ),
    ),
    "shown": m.Shown(**TO, question=3, start=0, total=4, part=b"abcd", signature=bytes(64)),
    "audited": Audited(**TO, round_no=7, chunks=(ChunkVerdict(3, False, ("bob",)),)),
    "leave": m.Leave(**TO, reason="bye"),
    "look": Look(),
    "tick": m.Tick(
        **TO,
        answers=8,
        heard_s=1.5,
        fragments=(
            m.FragmentTick(
                *(0, 3, ((2, H1), (3, H2)), True, ("bob",), 7, False, 0),
                sections=(
                    AheadTick(9, AheadPlan(9, ("cyd",), ("int8",), ("ann", "bob"), (0, 1))),
                    EncodeTick(2),
                ),
            ),
        ),
        goal="train",
        reason="go",
        roster_no=1,
        roster=(Contact("ann", "amber-fox", H1, "host:1"),),
        leases=(m.Lease(1, 0, 0, 8, 0), m.Lease.at(2, 0, 8, 16, (9, 8))),
        ways=(RelayRoute("bob", 29802, "AbC_-"), RelayRoute("cyd", 29802, "AbC_-", "192.0.2.7")),
        void=(3,),
        era=1,
        advice="use the same data",
        era_because="ann came back",
        amendments=(Amendment(1, 4, 0, b'{"round":{"sync_every":10}}', H1, bytes(96)),),
        roster_since=1,
        roster_gone=("dan",),
        sections=(
            DUE,
            ServeTick(2),
            ScoreTick(9, (4, 3), b"\x81", True),
            ReachTick(
                True,
                (Meet("bob", "203.0.113.7:40001", 12.5),),
                RelayOrder(3, 2, H1, (bytes(16),), "nobody answers there"),
            ),
        ),
    ),
    "open": m.OpenRound(**TO, plan=PLAN, amended=1),
    "decided": m.Decided(**TO, decision=DECISION),
    "committed": m.Committed(**TO, commit=COMMIT, nonce=H1, amended=1, kept=KEPT),
    "show": m.Show(
        **TO, question=3, what=m.What.BEFORE, fragment=0, version=4, chunk=1, start=0, round_no=0, peer=""
    ),
    "aborted": m.Aborted(**TO, round_no=7, reason="too late"),
    "audit": AuditChunks(
        **TO,
        round_no=7,
        version=3,
        fragment=0,
        members=("ann",),
        weights=(1.0,),
        codecs=("int8",),
        chunks=(DrawnChunk(2, H1, H2),),
    ),
    "gone": m.Gone(**TO, reason="again please", final=False),
    "keep": Keep(**TO, kept=KEPT),
    "ask_kept": AskKept(nonce=H1, below=9),
    "kept": KeptReceipts(
        identity=H1, kept=KEPT, commits=(COMMIT,), model=MODEL, manifest=b"{}", signature=bytes(64)
    ),
}
KINDS = sorted(EXAMPLES)
FIELDS = [(kind, field) for kind in KINDS for field in EXAMPLES[kind].__struct_fields__]

fixed = settings(max_examples=150)


def verdict_of(raw: bytes, allowed: frozenset[str] = ALL) -> Verdict:
    """What became of it.  Any error but a FrameError fails the test."""
    try:
        messages.decode(raw, allowed)
    except FrameError as error:
        assert str(error)
        return error.verdict
    return Verdict.ACCEPTED


def body_of(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = msgpack.unpackb(messages.encode(EXAMPLES[kind]))["body"]
    return body


def packed(kind: object, body: object) -> bytes:
    raw: bytes = msgpack.packb({"kind": kind, "body": body})
    return raw


# ---- the protocol itself -----------------------------------------------------------------------------------


def test_there_is_an_example_of_every_kind() -> None:
    assert {kind: type(example) for kind, example in EXAMPLES.items()} == m.KINDS


FROZEN_FIELDS = {
    "knock": "protocol run helps",
    "hello": "protocol run_id identity key address software manifest model fragments version digest process token "
    "signature fits helps kept",
    "ask_status": "run",
    "probe": "padding want address key look",
    "probed": "came_from wall_s padding dialled port",
    "challenge": "nonce run_id manifest model protocol",
    "welcome": "session incarnation member_port fragments roster whereabouts",
    "refuse": "code reason retry_after_s",
    "stands_by": "whereabouts",
    "status": "status",
    "beat": "session seq roster_no fragments phase step tokens loss tx_bytes rx_bytes up_bytes_per_s "
    "down_bytes_per_s have want samples rough era saved unsure leaving data amended "
    "lacks_start forward sections",
    "sent": "session seq round_no hashes tokens steps loss used seat counted signature",
    "progress": "session seq round_no decision_no held refused cut_off merged merged_hashes got got_hash "
    "dots inputs signature lengths got_by held_since sections",
    "audited": "session seq round_no chunks group",
    "audit": "session seq round_no version fragment members weights codecs chunks group of_sums",
    "shown": "session seq question start total part signature",
    "leave": "session seq reason",
    "look": "",
    "tick": "session seq answers heard_s fragments goal reason roster_no roster leases void era advice era_because "
    "ways amendments beat_s roster_since roster_gone sections",
    "open": "session seq plan amended",
    "decided": "session seq decision",
    "committed": "session seq commit nonce amended kept",
    "show": "session seq question what fragment version chunk start round_no peer",
    "aborted": "session seq round_no reason",
    "gone": "session seq reason final",
    "keep": "session seq kept",
    "ask_kept": "nonce below",
    "kept": "identity kept commits model manifest amendments signature",
}
# Who says nothing says the usual.
MAY_LACK = {
    ("hello", "fits"),
    ("hello", "helps"),
    ("knock", "helps"),
    ("challenge", "model"),
    ("tick", "ways"),
    ("tick", "roster_since"),
    ("tick", "roster_gone"),
    ("tick", "sections"),
    ("beat", "sections"),
    ("progress", "sections"),
    ("beat", "lacks_start"),
    ("beat", "forward"),
    ("probe", "look"),
    ("probed", "port"),
    ("tick", "amendments"),
    ("tick", "beat_s"),
    ("beat", "amended"),
    ("open", "amended"),
    ("committed", "amended"),
    ("committed", "kept"),
    ("hello", "kept"),
    ("kept", "commits"),
    ("kept", "model"),
    ("kept", "manifest"),
    ("kept", "amendments"),
    ("kept", "signature"),
    ("audited", "group"),
    ("audit", "group"),
    ("audit", "of_sums"),
    ("progress", "held_since"),
    *(("beat", name) for name in ("loss", "have", "want", "unsure", "leaving", "data")),
    *(("tick", name) for name in ("roster", "leases", "void", "advice", "era_because")),
    *(("progress", name) for name in ("refused", "cut_off", "merged", "merged_hashes", "dots", "inputs")),
    *(("progress", name) for name in ("signature", "lengths", "got_by")),
}

FROZEN_PARTS = {
    ChunkVerdict: "chunk wrong missing",
    DrawnChunk: "chunk result hashes",
    GroupSums: "chunks hashes inputs signature",
    m.FragmentBeat: "fragment version digest round_no epoch decision_no ready need dropped shown sections",
    BatchBeat: "version seat trainer counted unusable want unit_s table_no holds made complains losses",
    BatchTick: "version epoch start stop count seat granted freeze again table_no table skipped doubted held_out",
    Complaint: "seat damaged",
    SeatRow: "number peer stage share since gone",
    DotProducts: "members chunks products",
    m.FragmentTick: "fragment version digests verified donors round_no sent_seen progress_seen compare dropped "
    "proof nonce_for nonce refuted fellows sections",
    ServeTick: "stage",
    ScoreTick: "number versions windows text",
    ScoreBeat: "number nats data why_not text",
    FiguresBeat: "figures",
    ReachBeat: "punched relay unmet",
    ReachTick: "look meets relay",
    ShelfBeat: "shelf",
    KeptBeat: "number",
    AheadBeat: "number",
    AheadTick: "number plan",
    MeshReport: "sums dots tags",
    EncodeTick: "decision_no",
    AheadPlan: "number senders codecs members owners",
    Plan: "round_no epoch version members owners codecs fragment kept groups roots column",
    MeshColumn: "group groups peers owners roots",
    Decision: "round_no decision_no weights reasons summed weigh_sums foreseen",
    Commit: "version round_no members weights hashes codec fragment factor",
    Used: "lease upto",
    SignedHead: "run_id manifest number before after incarnation era versions commits books proof",
    KeptCommit: "head books",
    Contact: "peer name key address",
    RelayRoute: "peer port ticket host",
    RelayOffer: "port bytes_per_s number pairs waiting moved_bytes refused why_not",
    RelayOrder: "number incarnation public pairs why_not",
    Meet: "peer endpoint at_s",
    m.Lease: "lease epoch start stop upto uptos",
    ModelSchema: "tensors chunk_elements chunk_count first_plain_chunk frozen stages riders matrices",
    TensorSpec: "name shape dtype kind",
    StageSpec: "first_part first_tensor chunk_count plain_chunks gives",
    BorderTensor: "dtype shape name",
}


def test_control_kinds_and_fields_are_exactly_these() -> None:
    """A change here is another version of the protocol."""
    assert {kind: " ".join(cls.__struct_fields__) for kind, cls in m.KINDS.items()} == FROZEN_FIELDS
    assert {part: " ".join(part.__struct_fields__) for part in FROZEN_PARTS} == FROZEN_PARTS
    assert limits.PROTOCOL_VERSION == 11


def test_figures_of_scripts_are_few_and_have_plain_names() -> None:
    def sent(*figures: tuple[str, float]) -> None:
        msgspec.msgpack.decode(msgspec.msgpack.encode(FiguresBeat(figures)), type=FiguresBeat)

    sent(
        *((f"n{number}", 1.0) for number in range(limits.FIGURES_MOST)),
    )
    for odd in ("", "x" * (limits.FIGURE_CHARS + 1), "a b", "\x1b[2J", "a\nb", "a\n", "é"):
        with pytest.raises(msgspec.ValidationError):
            sent((odd, 1.0))
    with pytest.raises(msgspec.ValidationError):
        sent(*((f"n{number}", 1.0) for number in range(limits.FIGURES_MOST + 1)))


def test_every_kind_comes_back_as_it_was_sent() -> None:
    for kind in KINDS:
        assert messages.decode(messages.encode(EXAMPLES[kind]), frozenset({kind})) == EXAMPLES[kind]


def test_a_whole_roster_fits_into_one_message() -> None:
    one = Contact("a" * 16, "indigo-falcon", H1, "h" * limits.ADDRESS_CHARS)
    way = RelayRoute("a" * 16, 65535, "t" * limits.TICKET_CHARS, "h" * limits.HOST_CHARS)
    order = RelayOrder(1 << 40, 1 << 40, H1, (bytes(16),) * limits.WAYS_MOST, "w" * 200)
    amendment = Amendment(1, 1 << 40, 0, bytes(limits.AMENDMENT_BYTES), H1, bytes(96))
    tick = msgspec.structs.replace(
        EXAMPLES["tick"],
        roster=(one,) * limits.ROSTER_MOST,
        ways=(way,) * limits.WAYS_MOST,
        amendments=(amendment,) * limits.AMENDMENTS_TOLD,
        sections=(
            ReachTick(True, (Meet("a" * 16, "h" * limits.ADDRESS_CHARS, 1.0),) * limits.MEETS_AT_ONCE, order),
            replace(DUE, table=(SeatRow(2, "a" * 16, 1, 0.5, 4, 0),) * limits.SEATS_TOLD),
        ),
        roster_since=1,
        roster_gone=("a" * 16,) * limits.ROSTER_GONE_MOST,
    )
    assert messages.decode(messages.encode(tick), ALL) == tick


def test_a_message_over_the_limit_is_not_even_sent() -> None:
    with pytest.raises(ValueError, match="status message of"):
        messages.encode(m.StatusReply(status=bytes(limits.CONTROL_FRAME_BYTES)))


# ---- what is refused ------------------------------------------------------------------------------


def test_a_kind_that_is_not_allowed_here_is_unauthorised_whatever_is_in_it() -> None:
    for kind in KINDS:
        assert verdict_of(messages.encode(EXAMPLES[kind]), ALL - {kind}) == Verdict.UNAUTHORISED, kind
        assert verdict_of(packed(kind, "anything"), ALL - {kind}) == Verdict.UNAUTHORISED, kind


def test_a_frame_over_the_limit_is_oversize_and_not_parsed() -> None:
    deep = b"\x91" * (limits.CONTROL_FRAME_BYTES + 1)
    assert verdict_of(deep) == Verdict.OVERSIZE
    assert verdict_of(deep[:-1]) == Verdict.MALFORMED


def test_every_cut_of_every_kind_is_malformed() -> None:
    for kind in KINDS:
        raw = messages.encode(EXAMPLES[kind])
        assert {verdict_of(raw[:length]) for length in range(len(raw))} == {Verdict.MALFORMED}, kind
        assert verdict_of(raw + b"\0") == Verdict.MALFORMED, kind


def test_a_section_that_no_mode_has_or_of_another_message_is_malformed() -> None:
    body = body_of("beat")
    of_tick = msgpack.unpackb(msgspec.msgpack.encode(ServeTick(2)))
    [kept] = [each for each in body["sections"] if each[0] == "kept"]
    for wrong in (["nobody", 1], [], ["kept"], [*kept, 1], of_tick):
        assert verdict_of(packed("beat", {**body, "sections": [wrong]})) == Verdict.MALFORMED, wrong
    many = [kept] * SECTIONS_MOST
    assert verdict_of(packed("beat", {**body, "sections": many})) == Verdict.ACCEPTED
    assert verdict_of(packed("beat", {**body, "sections": [*many, kept]})) == Verdict.MALFORMED


def test_of_several_sections_of_one_kind_the_first_counts() -> None:
    several = (ReachBeat(("bob",)), KeptBeat(7), KeptBeat(8))
    assert section(KeptBeat, several) == KeptBeat(7)
    assert section(ShelfBeat, several) is None


def test_a_field_of_the_wrong_type_or_length_or_none_at_all_is_malformed() -> None:
    for kind, field in FIELDS:
        body = body_of(kind)
        for wrong in (
            {"no": ["field"]},
            [[["x"]]],
            "x" * (limits.CONTROL_STR_BYTES + 1),
            bytes(limits.CONTROL_BIN_BYTES + 1),
            [0] * (limits.CONTROL_ARRAY_LEN + 1),
            {str(key): 0 for key in range(limits.CONTROL_MAP_LEN + 1)},
            msgpack.Timestamp(0),
            msgpack.ExtType(5, b"x"),
        ):
            assert verdict_of(packed(kind, {**body, field: wrong})) == Verdict.MALFORMED, (kind, field)
        body.pop(field, None)  # what is as usual is not there
        due = Verdict.ACCEPTED if (kind, field) in MAY_LACK else Verdict.MALFORMED
        assert verdict_of(packed(kind, body)) == due, (kind, field)


def test_a_field_too_many_is_malformed() -> None:
    for kind in KINDS:
        body = body_of(kind)
        assert verdict_of(packed(kind, {**body, "extra": 1})) == Verdict.MALFORMED, kind
        raw = msgpack.packb({"kind": kind, "body": body, "extra": 1})
        assert verdict_of(raw) == Verdict.MALFORMED, kind


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("knock", "run", "r" * 65),
        ("hello", "address", "a" * (limits.ADDRESS_CHARS + 1)),
        ("hello", "software", "s" * 257),
        ("hello", "identity", bytes(31)),
        ("hello", "digest", bytes(33)),
        ("hello", "signature", bytes(65)),
        ("hello", "version", -2),
        ("beat", "session", bytes(15)),
        ("beat", "phase", "p" * 17),
        ("beat", "fragments", []),
        ("beat", "fragments", [[-1, b"", 0, 0, 0, False, []]] * (limits.FRAGMENTS_MAX + 1)),
        ("beat", "fragments", [[-1, b"", 0, 0, 0, False, [1] * 9]]),
        ("beat", "fragments", [[-1, b"", 0, 0, 0, 1, []]]),
        ("beat", "have", [1] * 257),
        ("beat", "tokens", limits.TOKENS_MAX + 1),
        ("beat", "want", -1),
        ("sent", "hashes", bytes(32 * limits.CHUNKS_PER_FRAGMENT + 1)),
        ("sent", "used", [[1, 1]] * 257),
        ("beat", "batch", [3, 2, 1, bytes(513), b"", True, 0.5]),
        ("beat", "batch", [3, 2, 1, b"", bytes(513), True, 0.5]),
        ("beat", "batch", [3, 2, 1, b"", b"", True, -0.5]),
        ("sent", "counted", bytes(513)),
        ("sent", "signature", bytes(65)),
        ("tick", "beat_s", limits.BEAT_LONGEST_S + 1.0),
        ("tick", "beat_s", -1.0),
        ("tick", "batch", [3, 0, 0, 8, limits.MICROS_PER_BATCH + 1, 2, [], False]),
        ("tick", "batch", [3, 0, 0, 8, 8, 2, [[0, 1]] * 2049, False]),
        ("tick", "batch", [3, 0, 0, 8, 8, 2, [], False, b"", 1, [[1, "ann", 0, 1.0, 1, 0]] * 1025]),
        ("sent", "used", [[1, 1, 1]]),
        ("progress", "got", bytes(limits.CHUNKS_PER_FRAGMENT // 8 + 1)),
        ("progress", "lengths", bytes(8 * limits.CHUNKS_PER_FRAGMENT + 1)),
        ("progress", "held", {str(peer): [b"", H1] for peer in range(limits.MEMBERS_PER_ROUND + 1)}),
        ("leave", "reason", "r" * 2001),
        ("welcome", "member_port", 65536),
    ],
)
def test_a_value_over_its_own_bound_is_malformed(kind: str, field: str, value: object) -> None:
    assert verdict_of(packed(kind, {**body_of(kind), field: value})) == Verdict.MALFORMED


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_five_bytes_that_claim_four_billion_elements_take_no_memory(claim: bytes) -> None:
    tracemalloc.start()
    try:
        assert verdict_of(claim + b"\xff\xff\xff\xff") == Verdict.MALFORMED
        assert verdict_of(b"\x82\xa4kind\xa4beat\xa4body" + claim + b"\xff\xff\xff\xff") == Verdict.MALFORMED
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_nested_claims_take_no_more_memory_than_a_few_hundred_frames() -> None:
    """Each level claims the longest list allowed: the worst that a frame can do before it is refused."""
    tracemalloc.start()
    try:
        for head in (b"\xdc\x10\x00", b"\xde\x04\x00\xa1x"):
            assert verdict_of((head * limits.CONTROL_FRAME_BYTES)[: limits.CONTROL_FRAME_BYTES]) == (
                Verdict.MALFORMED
            )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


# ---- fuzz -----------------------------------------------------------------------------------------

ENDS = (Verdict.ACCEPTED, Verdict.MALFORMED)
keys = st.text(max_size=6) | st.sampled_from(["kind", "body", *FROZEN_FIELDS["beat"].split()])
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.binary(max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)


@fixed
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(raw: bytes) -> None:
    assert verdict_of(raw) == Verdict.MALFORMED


@fixed
@given(trees)
def test_random_structures_are_malformed(tree: object) -> None:
    assert verdict_of(msgpack.packb(tree)) == Verdict.MALFORMED


@fixed
@given(st.sampled_from(KINDS) | leaves, trees)
def test_random_bodies_of_every_kind_are_malformed(kind: object, body: object) -> None:
    assert verdict_of(packed(kind, body)) == Verdict.MALFORMED


@fixed
@given(st.sampled_from(FIELDS), trees)
def test_a_random_value_in_any_field_is_taken_or_malformed(where: tuple[str, str], value: object) -> None:
    kind, field = where
    assert verdict_of(packed(kind, {**body_of(kind), field: value})) in ENDS


@fixed
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 999), st.integers(1, 255)), min_size=1))
def test_flipped_bytes_never_raise_anything_else(kind: str, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(messages.encode(EXAMPLES[kind]))
    for position, change in flips:
        raw[position % len(raw)] ^= change
    assert verdict_of(bytes(raw)) in ENDS


@pytest.mark.parametrize("depth", [10, 500, 1023, 1025, 20_000])
def test_deep_nesting_is_malformed(depth: int) -> None:
    for opening in (b"\x91", b"\x81\xa1x"):
        assert verdict_of(opening * depth + b"\xc0") == Verdict.MALFORMED
        body = b"\x82\xa4kind\xa4beat\xa4body" + opening * depth + b"\xc0"
        assert verdict_of(body) == Verdict.MALFORMED
