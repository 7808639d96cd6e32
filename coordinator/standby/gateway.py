"""Talks to an etcd cluster: questions and transactions by its JSON gateway (/v3, etcd 3.4 and newer), over HTTP.

Called by etcd_store.py, each of its threads with a gateway of its own.  The standard library is enough: six calls,
none of which streams, against a client of gRPC that would be the largest thing a coordinator needs.  Whoever does not
answer is passed over, and the next one asked the same again, so everything that is sent must be safe to be sent twice.
Must not know what the keys mean.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from farflung.coordinator.standby.etcd_url import StoreUrl
from farflung.protocol.errors import Unreachable, UserError

ATTEMPT_S = 1.0  # for one of the cluster to answer; etcd's own elections take about as long
READ_ATTEMPT_S = 10.0  # where the answer may be megabytes
PAUSE_S = 0.05  # once all were asked in vain
PAGE = 500  # keys in one answer
_ANSWER_BYTES_MOST = 1 << 30
_UNAUTHENTICATED = 16  # gRPC's numbers, which stand in the answers
_FOR_OTHERS_TO_TRY = frozenset({1, 4, 10, 14})  # cancelled, too late, aborted, unavailable

Json = dict[str, Any]
Op = Json


def text_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


@dataclass(frozen=True)
class Pair:
    """A key with what stands there."""

    key: bytes
    value: bytes
    created: int  # the cluster's revision that made this key
    changed: int  # and the one that wrote it last
    lease: str  # "0": none

    @classmethod
    def of(cls, told: Json) -> Pair:
        value = base64.b64decode(told.get("value", ""))
        created, changed = int(told.get("create_revision", 0)), int(told.get("mod_revision", 0))
        return cls(base64.b64decode(told["key"]), value, created, changed, str(told.get("lease", "0")))


@dataclass(frozen=True)
class StoreOutcome:
    held: bool  # what was compared; then the first list of operations was carried out, else the second
    answers: tuple[tuple[Pair, ...], ...]  # of each operation; empty for one that reads nothing
    revision: int = 0  # the cluster's, once it was carried out


def put(key: str, value: bytes, lease: str = "0") -> Op:
    return {"requestPut": {"key": text_of(key.encode()), "value": text_of(value), "lease": lease}}


def get(key: str) -> Op:
    return {"requestRange": {"key": text_of(key.encode())}}


def delete(first: str, end: str) -> Op:
    """From the first on, without the end."""
    return {"requestDeleteRange": {"key": text_of(first.encode()), "range_end": text_of(end.encode())}}


def made_at(key: str, revision: int) -> Json:
    """A comparison: this revision made the key; 0: it is not there."""
    told = {"key": text_of(key.encode()), "target": "CREATE", "result": "EQUAL"}
    return told | {"createRevision": str(revision)}


def changed_at(key: str, revision: int) -> Json:
    """A comparison: this revision wrote the key last; 0: it is not there."""
    told = {"key": text_of(key.encode()), "target": "MOD", "result": "EQUAL"}
    return told | {"modRevision": str(revision)}


class EtcdGateway:
    def __init__(self, url: StoreUrl, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._at = 0  # whom of the cluster it talks to
        self._line: http.client.HTTPConnection | None = None
        self._token = ""
        self._tls = ssl.create_default_context() if url.tls else None

    def ask(self, path: str, question: Json, within_s: float, attempt_s: float = ATTEMPT_S) -> Json:
        """Unreachable: nobody answered in time, and the question may have been carried out or not.  UserError: no."""
        until, tried, why = self._clock() + within_s, 0, "no time is left"
        while (left_s := until - self._clock()) > 0:
            try:
                return self._ask_one(path, question, min(left_s, attempt_s))
            except (OSError, http.client.HTTPException, json.JSONDecodeError, UnicodeError) as error:
                # The last of them is a name that no host can have, as one with two dots side by side.
                where = self._url.members[self._at]
                why = f"{where}: {error or type(error).__name__}"
                self._pass_over()
                tried += 1
                if tried % len(self._url.members) == 0:
                    time.sleep(max(0.0, min(PAUSE_S, until - self._clock())))
        raise Unreachable(f"{self._url}: no answer within {within_s:.1f} s ({why})")

    def transact(
        self, compared: Sequence[Json], then: Sequence[Op], otherwise: Sequence[Op], within_s: float
    ) -> StoreOutcome:
        question = {"compare": list(compared), "success": list(then), "failure": list(otherwise)}
        told = self.ask("/v3/kv/txn", question, within_s)
        with self._as_etcd_says():
            held, said = bool(told.get("succeeded")), told.get("responses", [])
            found = [each.get("response_range", {}).get("kvs", []) for each in said]
            if len(found) != len(then if held else otherwise):
                raise ValueError("not each operation has an answer")
            answers = tuple(tuple(map(Pair.of, each)) for each in found)
            return StoreOutcome(held, answers, int(told["header"]["revision"]))

    def grant(self, length_s: int, within_s: float) -> tuple[str, float]:
        """A lease: its number, and how long it is in seconds."""
        told = self.ask("/v3/lease/grant", {"TTL": str(length_s)}, within_s)
        with self._as_etcd_says():
            return str(told["ID"]), float(told["TTL"])

    def read(self, first: str, end: str, within_s: float) -> list[Pair]:
        """All keys from the first on, without the end, as they stood at one moment."""
        found: list[Pair] = []
        key, revision = first.encode(), "0"
        while True:
            question = {"key": text_of(key), "range_end": text_of(end.encode()), "limit": str(PAGE)}
            told = self.ask("/v3/kv/range", question | {"revision": revision}, within_s, READ_ATTEMPT_S)
            with self._as_etcd_says():
                page = [Pair.of(each) for each in told.get("kvs", [])]
                found += page
                if not told.get("more"):
                    return found
                key = page[-1].key + b"\0"
                revision = revision if revision != "0" else str(told["header"]["revision"])

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _pass_over(self) -> None:
        self.close()
        self._at = (self._at + 1) % len(self._url.members)

    def _ask_one(self, path: str, question: Json, attempt_s: float) -> Json:
        if self._url.user and not self._token:
            who = {"name": self._url.user, "password": self._url.password}
            told = self._say("/v3/auth/authenticate", who, attempt_s)
            with self._as_etcd_says():
                self._token = str(told["token"])
        return self._say(path, question, attempt_s)

    def _say(self, path: str, question: Json, attempt_s: float) -> Json:
        line = self._line = self._line or self._dialled(attempt_s)
        line.timeout = attempt_s
        if line.sock is not None:
            line.sock.settimeout(attempt_s)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        line.request("POST", path, json.dumps(question), headers)
        answer = line.getresponse()
        raw = answer.read(_ANSWER_BYTES_MOST)
        if answer.status != 200:
            raise self._refusal(answer.status, raw)
        told: Json = json.loads(raw)
        with self._as_etcd_says():
            said = told.get("result", told)  # of a call whose answers are a stream
            if "error" not in told and not isinstance(said["header"], dict):
                raise ValueError("an answer of etcd's has a header")
        if "error" in told:  # such a stream says with 200 that it cannot go on
            raise self._refusal(answer.status, json.dumps(told["error"]).encode())
        return told

    @contextlib.contextmanager
    def _as_etcd_says(self) -> Iterator[None]:
        """What is of another shape was said by something else."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError):
            raise UserError(
                f"{self._url}: no etcd answers at {self._url.members[self._at]}, but something else does; name the "
                "port at which etcd serves its clients, 2379 unless you chose another one"
            ) from None

    def _refusal(self, status: int, raw: bytes) -> OSError | UserError:
        """An OSError where another one of the cluster, or the next moment, may say something else."""
        try:
            told = json.loads(raw)
            why = str(told.get("message") or told.get("error"))
            code = int(told.get("code", told.get("grpc_code", 0)))
        except (ValueError, TypeError, AttributeError):
            why, code = raw[:100].decode("ascii", "replace"), 0
        if code == _UNAUTHENTICATED and self._token:
            self._token = ""  # it is old: etcd forgets them, and another one of the cluster never knew it
            return OSError(why)
        if code in _FOR_OTHERS_TO_TRY or (not code and status >= 500):
            return OSError(f"it says: {why}")
        if status == 404 and not code:
            why = "nothing answers at /v3; is this etcd 3.4 or newer?"
        return UserError(f"{self._url}: etcd refuses: {why}")

    def _dialled(self, attempt_s: float) -> http.client.HTTPConnection:
        host, port = self._url.members[self._at]
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=attempt_s, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=attempt_s)
