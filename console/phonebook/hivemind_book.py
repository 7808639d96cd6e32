"""hivemind's DHT as a phone book: runs by key and by name, for a community that keeps a well-known node.

Called by `farflung phonebook`, which runs a node or asks one, and by the process that announces a run.  Every
node checks what it is given (`Rule`): in hivemind the record with the latest expiry wins, so nothing may be kept
longer than the run's key has signed for, or a forged or an old record would push the newest one out.  hivemind
forks, and starts a daemon; so this is never in a peer's or a coordinator's process.  Must not know what a run is.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from farflung.console.phonebook.book import believed
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import Address, Whereabouts

NAMED_MOST = 256  # records of one name that are looked at
CLOCK_S = 2.0  # hivemind's own idea of the time
NEEDS = "a phone book needs hivemind: pip install 'farflung[hivemind]'"


def key_name(key: bytes) -> str:
    return f"farflung/run/{base64.urlsafe_b64encode(key).decode().rstrip('=')}"


def run_name(name: str) -> str:
    return f"farflung/name/{name}"


def is_kept(wanted: str, subkey: bytes, value: object, expires_s: float, wall_s: float) -> bool:
    """May a node keep this?  `wanted`: under which name; `subkey`: empty where it is the only record there."""
    said = believed(value, wall_s) if isinstance(value, bytes) else None
    if said is None or expires_s > said.expires_s + CLOCK_S:
        return False
    if wanted == key_name(said.key):
        return not subkey
    return wanted == run_name(said.run) and subkey == said.key


class HivemindBook:
    """A node of the DHT, or, with `client`, somebody who only asks."""

    def __init__(self, nodes: tuple[str, ...], listen: Address | None = None, client: bool = False) -> None:
        """`nodes`: multiaddresses to begin at; none for the first one."""
        try:
            import hivemind
            from hivemind.utils.logging import use_hivemind_log_handler
        except ImportError:
            raise UserError(NEEDS) from None
        use_hivemind_log_handler("nowhere")
        self._hivemind: Any = hivemind
        host = listen if listen is not None else Address("127.0.0.1", 0)
        family = "ip6" if ":" in host.host else "ip4"
        try:
            self._dht: Any = hivemind.DHT(
                initial_peers=list(nodes),
                host_maddrs=[f"/{family}/{host.host}/tcp/{host.port}"],
                record_validators=[rule()],
                client_mode=client,
                use_relay=False,
                use_auto_relay=False,
                use_ipfs=False,
                start=True,
            )
        except _start_errors() as error:
            raise Unreachable(f"the phone book did not start: {str(error)[:300]}") from error

    @property
    def places(self) -> tuple[str, ...]:
        """For others to begin at."""
        return tuple(map(str, self._dht.get_visible_maddrs()))

    def put(self, said: Whereabouts) -> int:
        taken = self._dht.store(key_name(said.key), said.raw, float(said.expires_s))
        named = self._dht.store(run_name(said.run), said.raw, float(said.expires_s), subkey=said.key)
        return int(bool(taken)) + int(bool(named))

    def find(self, key: bytes) -> list[bytes]:
        found = self._dht.get(key_name(key), latest=True)
        return [found.value] if found is not None and isinstance(found.value, bytes) else []

    def named(self, name: str) -> list[bytes]:
        found = self._dht.get(run_name(name), latest=True)
        several = found.value if found is not None and isinstance(found.value, dict) else {}
        records = [each.value for each in list(several.values())[:NAMED_MOST]]
        return [each for each in records if isinstance(each, bytes)]

    def close(self) -> None:
        self._dht.shutdown()


def _start_errors() -> tuple[type[Exception], ...]:
    """What its child process may say of why it did not start."""
    from hivemind.p2p import P2PDaemonError

    return (RuntimeError, ValueError, OSError, P2PDaemonError)


def rule() -> Any:
    """hivemind's face of `is_kept`; made here, since its base class is hivemind's."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase

    class Rule(RecordValidatorBase):  # type: ignore[misc]
        def validate(self, record: DHTRecord) -> bool:
            try:  # not by hivemind's own reader: these are a stranger's bytes
                value = msgspec.msgpack.decode(record.value, type=bytes)
                subkey = msgspec.msgpack.decode(record.subkey, type=bytes | None)
            except msgspec.MsgspecError:
                return False
            said = believed(value, time.time())
            if said is None:
                return False
            for name in (key_name(said.key), run_name(said.run)):
                if record.key == DHTID.generate(source=name).to_bytes():
                    return is_kept(name, subkey or b"", value, record.expiration_time, time.time())
            return False

        def sign_value(self, record: DHTRecord) -> bytes:
            return bytes(record.value)

        def strip_value(self, record: DHTRecord) -> bytes:
            return bytes(record.value)

        def merge_with(self, other: object) -> bool:
            return isinstance(other, type(self))

    return Rule()
