"""The words between a run's operator and its coordinator: orders, and the reply.

Sent over the operator's socket (coordinator/operator_socket.py) by console/operator_commands.py; obeyed in
coordinator/run/operator_orders.py and by modes.  Data only.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=500)]
Lasts = Annotated[float, Meta(gt=0, le=100 * 365 * 86400.0)]


class _Order(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    pass


class Invite(_Order, frozen=True, kw_only=True, tag="invite"):
    uses: Annotated[int, Meta(ge=1, le=10_000)]
    lasts_s: Lasts
    note: Text = ""


class Invites(_Order, frozen=True, kw_only=True, tag="invites"):
    pass


class Revoke(_Order, frozen=True, kw_only=True, tag="revoke"):
    which: Text  # the invitation's id or the beginning of it, its note, or the join URL that has it
    reason: Text
    guests: bool = False  # those that came in by it have to go, and need another one


class Kick(_Order, frozen=True, kw_only=True, tag="kick"):
    who: Text
    reason: Text


class Ban(_Order, frozen=True, kw_only=True, tag="ban"):
    who: Text
    reason: Text
    lasts_s: Lasts
    network: bool = False  # everybody else from its /24 or /48, too


class Unban(_Order, frozen=True, kw_only=True, tag="unban"):
    who: Text


class Bans(_Order, frozen=True, kw_only=True, tag="bans"):
    pass


class Pause(_Order, frozen=True, kw_only=True, tag="pause"):
    reason: Text


class Resume(_Order, frozen=True, kw_only=True, tag="resume"):
    pass


class Drain(_Order, frozen=True, kw_only=True, tag="drain"):
    pass


class Amend(_Order, frozen=True, kw_only=True, tag="amend"):
    """What may change while the run goes on is to be as in this run.toml."""

    manifest: Annotated[bytes, Meta(max_length=40 * 1024)]  # all of it, as JSON
    at: Annotated[int, Meta(ge=0)] | None = None  # in rounds from this version on; None: from the next one


class GoBack(_Order, frozen=True, kw_only=True, tag="go_back"):
    """To the newest version that somebody here holds or has a checkpoint of, without those who are away."""

    to: Annotated[int, Meta(ge=0)] | None = None  # 0: found the run anew, where nothing is left of it
    reason: Text = ""
    sure: bool = False  # else the answer says what would be lost, and nothing is done


class Rewind(_Order, frozen=True, kw_only=True, tag="rewind"):
    """Undo the rounds after this version for good."""

    to: Annotated[int, Meta(ge=0)]
    reason: Text = ""
    sure: bool = False


Order = (
    Invite | Invites | Revoke | Kick | Ban | Unban | Bans | Amend | Pause | Resume | Drain | GoBack | Rewind
)


class Reply(Struct, frozen=True, kw_only=True):
    """What was done, in words; `found`: the same for programs."""

    ok: bool = True
    text: str = ""
    found: dict[str, Any] = {}
