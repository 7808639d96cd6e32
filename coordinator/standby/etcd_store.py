"""A run's records in etcd, written by whoever holds the leader's key there, and by nobody else.

Made by standby.py, then used by the server like the journal of a folder (ledger/run_store.py).  Every write is one
transaction that holds only while the leader's key is the one that this process made: who was deposed is refused by
the write itself, whatever its clock says.  A write whose answer was lost is sent again, and recognised if it had come
through; the first request may arrive after that, at any time, so each write also holds only while the newest fold is
the one that it was made after.  Records of one `append` stand under one key, numbered by the first of them; what is
too large for one request lies in parts, which count from the moment at which the key that names them is there.

Who may lie: nobody here.  The cluster belongs to the host, who trusts it with the run's records as with its own disk.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from farflung.coordinator.ledger.journal import FOLD_AFTER_BYTES, RUN_ID_BYTES, agreed_manifest
from farflung.coordinator.ledger.records import UNREADABLE, Folded, Record, from_bytes, to_bytes
from farflung.coordinator.ledger.run_store import SCHEMA_VERSION, RecordChain, damaged
from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.coordinator.standby.gateway import (
    EtcdGateway,
    Json,
    Op,
    Pair,
    StoreOutcome,
    changed_at,
    delete,
    get,
    made_at,
    put,
)
from farflung.coordinator.standby.standby_rules import Leading, Sight, StoredRun
from farflung.protocol.errors import Deposed, FarflungError, Unreachable, UserError
from farflung.protocol.limits import WHEREABOUTS_BYTES
from farflung.protocol.manifest import Manifest

# ---- lease -------------------------------------------------------------------------------------------------
# How long this coordinator may act: a lease at the cluster, and the thread that keeps it alive.
#
# `StoreLease` is pure, and errs to the safe side: it counts from the moment at which
# the cluster was asked, so it is over here before it is over there, and nobody else leads until then. It is
# no fence: a process that stood still between a look and a word would not notice. What is fenced are the
# writes.

RENEWALS = 4  # in each lease


class StoreLease:
    def __init__(self, asked_at: float, length_s: float) -> None:
        """`length_s`: as the cluster gave it."""
        self.length_s = length_s
        self._until = asked_at + length_s
        self._is_lost = False

    @property
    def renew_every_s(self) -> float:
        return self.length_s / RENEWALS

    def on_answer(self, asked_at: float, left_s: float) -> None:
        """`left_s`: what the cluster says is left of it; nothing: it knows no such lease any more."""
        if left_s <= 0:
            self._is_lost = True
        self._until = max(self._until, asked_at + left_s)

    def left_s(self, now: float) -> float:
        return 0.0 if self._is_lost else max(0.0, self._until - now)

    def why_over(self, now: float) -> str:
        """Empty: it is not."""
        if self._is_lost:
            return "its lease ran out at the store"
        if now >= self._until:
            return f"the store did not renew its lease of {self.length_s:g} s in time"
        return ""


class LeaseKeeper:
    """Renews it until it is over, or `close`."""

    def __init__(
        self,
        gateway: EtcdGateway,
        number: str,
        lease: StoreLease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`number`: of the lease, at the cluster.  The gateway is this thread's alone."""
        self._gateway, self._number, self._lease, self._clock = gateway, number, lease, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._lease.renew_every_s) and self._lease.left_s(self._clock()) > 0:
                self._renew()
        finally:
            self._gateway.close()

    def _renew(self) -> None:
        asked_at, every_s = self._clock(), self._lease.renew_every_s
        try:
            told = self._gateway.ask("/v3/lease/keepalive", {"ID": self._number}, every_s, every_s)
        except Unreachable:
            return  # another one of the cluster is asked next; the lease itself says when that was too often
        except UserError as error:
            log.warning("the lease is not renewed: %s", error)
            return
        self._lease.on_answer(asked_at, float(told.get("result", {}).get("TTL", 0)))


# ---- etcd store --------------------------------------------------------------------------------------------

FOLD_AFTER_BATCHES = 10_000  # keys, which whoever takes over has to read
PART_BYTES = 1 << 20  # of one request etcd takes one and a half
LOOK_S = 2.0  # a look at who leads may take so long
READ_S = 60.0  # all records
GOODBYE_S = 1.0

log = logging.getLogger("farflung.coordinator")
_pack = msgspec.msgpack.Encoder().encode
_schema = msgspec.msgpack.Decoder(list[Any])  # the first of these
_batch = msgspec.msgpack.Decoder(tuple[int, bytes, list[bytes]])
_folded = msgspec.msgpack.Decoder(tuple[int, bytes, int, bytes])


class EtcdStore:
    def __init__(
        self, url: StoreUrl, restored: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run_id = b""
        self.manifest = Manifest()
        self.restored = restored
        self._url, self._clock = url, clock
        self._gateway = EtcdGateway(url, clock)
        self._chain: RecordChain | None = None  # through the newest record; None: they were not read
        self._fold_made = 0  # the revision that wrote the newest fold; 0: there is none
        self._grown_bytes = self._grown_batches = 0  # since it was folded
        self._lease: StoreLease | None = None
        self._lease_no = ""
        self._is_unsure = False  # whether the claim under that lease was carried out, or will be
        self._keeper: LeaseKeeper | None = None
        self._me = ""
        self._fence = 0

    @property
    def where(self) -> str:
        return str(self._url)

    # ---- looking ---------------------------------------------------------------------------------------------

    def look(self, within_s: float = LOOK_S) -> Sight:
        """Unreachable, if the cluster is.  A claim of its own that it knows nothing of is never taken for a leader."""
        self._take_back_claim()
        seen = self._gateway.transact([], [get(self._key("run")), get(self._key("leader"))], [], within_s)
        runs, leaders = seen.answers
        return Sight(
            kept=self._kept(runs[0]) if runs else None, leading=_leading(leaders[0]) if leaders else None
        )

    def check_rules(self, kept: StoredRun, manifest: Manifest) -> Manifest:
        return agreed_manifest(self.where, kept.manifest, manifest, self.records)

    # ---- leading ---------------------------------------------------------------------------------------------

    def try_to_lead(self, me: str) -> bool:
        """True: from now on only this process writes.  `me`: for people."""
        self._take_back_claim()
        asked_at = self._clock()
        self._lease_no, length_s = self._gateway.grant(self._url.lease_s, LOOK_S)
        self._me, self._is_unsure = me, True
        leader = self._key("leader")
        claim = put(leader, _claim(me, b""), self._lease_no)
        done = self._gateway.transact([made_at(leader, 0)], [claim, get(leader)], [get(leader)], LOOK_S)
        found = done.answers[-1]
        # Also where an answer was lost, and the second attempt met the first.
        if not found or found[0].lease != self._lease_no:
            self._take_back_claim()
            return False
        self._is_unsure = False
        self._fence = found[0].created
        self._lease = StoreLease(asked_at, length_s)
        self._keeper = LeaseKeeper(
            EtcdGateway(self._url, self._clock), self._lease_no, self._lease, self._clock
        )
        return True

    def begin(self, manifest: Manifest, key: bytes, new_run_id: Callable[[], bytes]) -> None:
        """The run that is kept here, as its leader; begun if there is none."""
        seen = self.look()
        kept = seen.kept
        if kept is None:
            kept = StoredRun(new_run_id(), key, manifest.canonical())
            told = {
                "format": SCHEMA_VERSION,
                "run_id": kept.run_id.hex(),
                "key": key.hex(),
                "manifest": kept.manifest.decode(),
                "sum": RecordChain.of(kept.run_id, kept.manifest).check.hex(),
            }
            place = self._key("run")
            self._write(place, json.dumps(told).encode(), [made_at(place, 0)], [])
        self.run_id = kept.run_id
        self.manifest = self.check_rules(kept, manifest)

    def check(self) -> None:
        lease, now = self._lease, self._clock()
        assert lease is not None, "it does not lead"
        if why := lease.why_over(now):
            raise Deposed(f"{self.where}: this coordinator leads no longer: {why}; {_NEXT}")

    def announce(self, whereabouts: bytes) -> None:
        self._write(self._key("leader"), _claim(self._me, whereabouts), [], [], self._lease_no)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._is_unsure or (self._lease is not None and not self._lease.why_over(self._clock())):
            self._revoke()
        self._lease = None
        self._gateway.close()

    def _take_back_claim(self) -> None:
        """One whose answers were lost may stand there, or arrive yet, and nobody renews its lease: this coordinator
        would stand by for itself.  Without the lease the claim counts for nothing, whenever it arrives."""
        if not self._is_unsure:
            return
        try:
            self._gateway.ask("/v3/lease/revoke", {"ID": self._lease_no}, LOOK_S)
        except UserError as error:
            log.info("a lease that nobody needs any more: %s", error)  # it ran out
        self._is_unsure = False

    def _revoke(self) -> None:
        """Who stands by need not wait until it runs out."""
        try:
            self._gateway.ask("/v3/lease/revoke", {"ID": self._lease_no}, GOODBYE_S)
        except FarflungError as error:
            log.info("the lease runs out by itself: %s", error)

    # ---- records ---------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """From the newest fold on; by whomever, but what follows is only known to be the end by who leads."""
        self._grown_bytes = self._grown_batches = self._fold_made = 0
        found = self._gateway.read(self._key("fold"), self._key("run0"), READ_S)
        named = {pair.key.decode().removeprefix(self._key("")): pair for pair in found}
        parts = {name: pair.value for name, pair in named.items() if name.startswith("parts/")}
        run = named.pop("run", None)
        kept = self._kept(run) if run is not None else None
        chain = RecordChain.of(kept.run_id, kept.manifest) if kept is not None else RecordChain.of(b"", b"")
        bodies: list[bytes] = []
        taken_up = ""  # up to this key all are in the fold, and one that arrived late may stand there again
        for name, pair in named.items():
            if name == "leader" or name in parts or (name.startswith("j/") and name <= taken_up):
                continue
            try:
                raw = _whole(pair, name, parts)
                self._check_format(raw)
                if name == "fold":
                    _, check, position, body = _folded.decode(raw)
                    chain, added = chain.before_fold_at(position), [body]
                    self._fold_made, taken_up = pair.changed, _name_at(position)
                else:
                    _, check, added = _batch.decode(raw)
                    self._grown_bytes += sum(map(len, added))
                    self._grown_batches += 1
            except (*UNREADABLE, KeyError, ValueError, OverflowError) as error:
                if isinstance(error, UserError):
                    raise
                what = f"record {chain.position + 1} cannot be read ({error})"
                raise damaged(self.where, what, bodies, _RESTORE) from error
            if name not in ("fold", _name_at(chain.position + 1)):
                # Positions count without a gap, so a lost record can't pass unnoticed.
                raise damaged(self.where, f"record {chain.position + 1} is missing", bodies, _RESTORE)
            after = chain.through(added)
            if after.check != check:
                what = f"records {chain.position + 1} to {after.position} do not match their checksum"
                raise damaged(self.where, what, bodies, _RESTORE)
            chain = after
            bodies += added
        self._chain = chain
        return [self._record(body) for body in bodies]

    def append(self, records: Sequence[Record]) -> None:
        assert self._chain is not None, "the records were not read"
        bodies = [to_bytes(record) for record in records]
        chain = self._chain.through(bodies)
        name = _name_at(self._chain.position + 1)
        place = self._key(name)
        head = self._in_parts(name, _pack((SCHEMA_VERSION, chain.check, bodies)))
        # A fold takes the key away: an attempt that arrives after it would find the place free.
        self._write(place, head, [made_at(place, 0), self._since_fold()], [])
        self._chain = chain
        self._grown_bytes += sum(map(len, bodies))
        self._grown_batches += 1

    @property
    def is_long(self) -> bool:
        return self._grown_bytes >= FOLD_AFTER_BYTES or self._grown_batches >= FOLD_AFTER_BATCHES

    def fold(self, folded: Callable[[int], Folded]) -> None:
        assert self._chain is not None, "the records were not read"
        position = self._chain.position
        body = to_bytes(folded(position))
        chain = self._chain.before_fold_at(position).then(body)
        # Named by its position: the parts of the fold before are in use until the key changes.
        head = self._in_parts(f"fold-{position:016x}", _pack((SCHEMA_VERSION, chain.check, position, body)))
        gone = [
            delete(self._key("j/"), self._key(_name_at(position + 1))),
            delete(self._key("parts/fold-"), self._key(f"parts/fold-{position:016x}")),
            delete(self._key("parts/j/"), self._key(f"parts/j/{position + 1:016x}")),
        ]
        self._fold_made = self._write(self._key("fold"), head, [self._since_fold()], gone)
        self._chain = chain
        self._grown_bytes = self._grown_batches = 0

    def _since_fold(self) -> Json:
        return changed_at(self._key("fold"), self._fold_made)

    def _check_format(self, raw: bytes) -> None:
        schema = next(iter(_schema.decode(raw)), None)
        if schema != SCHEMA_VERSION:
            raise UserError(
                f"{self.where}: written in format {schema}, this farflung reads format {SCHEMA_VERSION}: go on with "
                "the farflung that led this run last"
            )

    def _record(self, body: bytes) -> Record:
        try:
            return from_bytes(body)
        except UNREADABLE as error:
            raise UserError(
                f"{self.where}: a record is as it was written and cannot be read ({error}): a newer farflung wrote it"
            ) from error

    # ---- writing ---------------------------------------------------------------------------------------------

    def _write(
        self, place: str, value: bytes, compared: Sequence[Json], also: Sequence[Op], lease: str = "0"
    ) -> int:
        """Fenced; sent again until the lease is over, and taken for done if it stands there as it was to.  The revision
        that wrote it."""
        self.check()
        assert self._lease is not None
        leader = self._key("leader")
        within_s = self._lease.left_s(self._clock())
        fence = [made_at(leader, self._fence), *compared]
        try:
            done = self._gateway.transact(
                fence, [put(place, value, lease), *also], [get(leader), get(place)], within_s
            )
        except Unreachable as error:
            raise Deposed(
                f"{self.where}: this coordinator leads no longer: it could not write within its lease ({error}); "
                f"{_NEXT}"
            ) from error
        return done.revision if done.held else self._judge(done, value)

    def _judge(self, refused: StoreOutcome, value: bytes) -> int:
        leaders, there = refused.answers
        if not leaders or leaders[0].created != self._fence:
            other = f": {_leading(leaders[0]).who} leads" if leaders else ", and nobody has it now"
            raise Deposed(
                f"{self.where}: this coordinator leads no longer: its key was taken away{other}; {_NEXT}"
            )
        if not there or there[0].value != value:
            raise Deposed(
                f"{self.where}: somebody else wrote where this coordinator writes, under its own key; is another "
                "program using this prefix?"
            )
        return there[0].changed

    def _in_parts(self, name: str, raw: bytes) -> bytes:
        """What stands under the key itself: all of it, or how many parts there are.  Few runs have any: a turn of the
        loop with a megabyte of records, or the ledger of months."""
        if len(raw) <= PART_BYTES:
            return b"w" + raw
        parts = [raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES)]
        for number, part in enumerate(parts):
            self._write(self._key(f"parts/{name}/{number:04x}"), part, [], [])
        return f"p{name} {len(parts)}".encode()

    def _key(self, name: str) -> str:
        return f"{self._url.prefix}/{name}"

    def _kept(self, pair: Pair) -> StoredRun:
        try:
            told = json.loads(pair.value)
            schema, manifest = int(told["format"]), str(told["manifest"]).encode()
            kept = StoredRun(bytes.fromhex(told["run_id"]), bytes.fromhex(told["key"]), manifest)
            whole = told.get("sum") == RecordChain.of(kept.run_id, manifest).check.hex()
            if schema == SCHEMA_VERSION and len(kept.run_id) != RUN_ID_BYTES:
                raise ValueError("no run id")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self.where}: what stands there is no run of farflung's; {_OTHER}") from None
        if schema != SCHEMA_VERSION:
            raise UserError(
                f"{self.where}: begun by another farflung, in format {schema}; this one reads format {SCHEMA_VERSION}"
            )
        if not whole:
            raise damaged(self.where, "its run id or its rules do not match their checksum", [], _RESTORE)
        return kept


_NEXT = "nothing acknowledged is lost, and started again it stands by"
_RESTORE = (
    "restore the store from its backup, or empty it under this prefix, and start with --restored: peers give back what "
    "is missing"
)
_OTHER = "choose another prefix: etcd://HOST:PORT/PREFIX"


def _name_at(position: int) -> str:
    """Of the batch that begins with this record; in order, as the positions are."""
    return f"j/{position:016x}"


def _whole(pair: Pair, name: str, parts: dict[str, bytes]) -> bytes:
    if pair.value[:1] == b"w":
        return pair.value[1:]
    if pair.value[:1] != b"p":
        raise ValueError(f"{name} is not farflung's")
    named, _, count = pair.value[1:].decode().partition(" ")
    return b"".join(parts[f"parts/{named}/{number:04x}"] for number in range(int(count)))


def _claim(who: str, whereabouts: bytes) -> bytes:
    told = {"who": who, "process": os.getpid(), "where": base64.b64encode(whereabouts).decode()}
    return json.dumps(told).encode()


def _leading(pair: Pair) -> Leading:
    try:
        told = json.loads(pair.value)
        who, whereabouts = str(told["who"]), base64.b64decode(told["where"])
        if len(whereabouts) > WHEREABOUTS_BYTES:
            raise ValueError("no list of ours")
    except (ValueError, KeyError, TypeError):
        who, whereabouts = "somebody who is no farflung", b""
    return Leading(who, whereabouts, pair.created, pair.lease)
