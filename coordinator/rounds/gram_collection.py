"""What owners say of the contributions' dot products in one round: collected, checked, asked for.  Pure.

Part of the round at the coordinator.  A share's matrix counts when it covers exactly the chunks that its owner owns
now, and all members that are to be compared.  Numbers that no vectors can have are a lie or a fault of the owner.
In a round of groups an owner compares the members of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from farflung.coordinator.rounds.groups import Groups
from farflung.coordinator.rounds.outliers import Compared, Matrix, OwnerShare
from farflung.protocol.digests import bits, mask_from_bytes, mask_of, mask_to_bytes
from farflung.protocol.messages import DotProducts

ROUNDING = 1e-3  # products are summed in fp32 by tiles: so much over what vectors can have is forgiven
PRODUCT_MOST = 1e100  # more than any model's values of fp32 have; sums of them are finite


class Comparing:
    def __init__(self, members: Sequence[str]) -> None:
        self._members = list(members)
        self._said: dict[str, DotProducts] = {}  # by owner
        self._products: dict[
            str, Matrix
        ] = {}  # the same as a matrix, with a row for each of the run's members
        self._asked: tuple[str, ...] = ()
        self.impossible: dict[str, str] = {}  # owner -> what is wrong with its numbers
        self.asks_anew = False  # somebody has to be told whom to compare

    def on_report(self, owner: str, said: DotProducts | None) -> None:
        if said is None or said == self._said.get(owner):
            return
        products = _matrix(said, len(self._members))
        problem = products if isinstance(products, str) else _problem(products)
        if problem:
            self.impossible[owner] = problem
        elif not isinstance(products, str):
            self._said[owner], self._products[owner] = said, products

    def lacking(self, ready: Sequence[str], shares: Mapping[str, int]) -> list[str]:
        """Owners whose word is missing before these members can be compared.  `shares`: owner -> mask of its chunks."""
        wanted = self._mask(ready)
        lacking = [owner for owner, share in shares.items() if not self._covers(owner, share, wanted)]
        if lacking and tuple(ready) != self._asked:
            self._asked, self.asks_anew = tuple(ready), True
        return lacking

    @property
    def asked(self) -> bytes:
        """The mask of members that owners are to compare; empty: not asked for, they compare whom they have."""
        return mask_to_bytes(self._mask(self._asked))

    def shares_of(self, ready: Sequence[str], shares: Mapping[str, int]) -> list[OwnerShare]:
        """By owner; call it when nothing is lacking."""
        rows = [self._members.index(member) for member in ready]
        return [
            OwnerShare(share.bit_count(), self._products[owner][np.ix_(rows, rows)])
            for owner, share in sorted(shares.items())
        ]

    def _covers(self, owner: str, share: int, wanted: int) -> bool:
        said = self._said.get(owner)
        return (
            said is not None
            and mask_from_bytes(said.chunks) == share
            and not wanted & ~mask_from_bytes(said.members)
        )

    def _mask(self, members: Sequence[str]) -> int:
        return mask_of(self._members.index(member) for member in members)


class ComparingMembers:
    """Those of each group among themselves; a flat round is one group."""

    def __init__(self, groups: Groups) -> None:
        self._by_group = tuple(map(Comparing, groups.members))
        self._of = groups.of

    def on_report(self, owner: str, said: DotProducts | None) -> None:
        self._by_group[self._of[owner]].on_report(owner, said)

    def lacking(self, ready: Sequence[str], groups: Groups) -> list[str]:
        """Owners whose word is missing before these members can be compared."""
        found: list[str] = []
        for group, among in self._ready_in(ready):
            found += self._by_group[group].lacking(among, groups.shares_in[group])
        return found

    def compared(self, ready: Sequence[str], groups: Groups) -> list[Compared]:
        """Group by group; call it when nothing is lacking."""
        return [
            Compared(among, self._by_group[group].shares_of(among, groups.shares_in[group]))
            for group, among in self._ready_in(ready)
        ]

    def asked_of(self, member: str) -> bytes:
        """The mask of those of its group that owners there are to compare."""
        return self._by_group[self._of[member]].asked if member in self._of else b""

    def asks_anew(self) -> bool:
        """True once after each change of whom somebody is to compare."""
        asks = any(each.asks_anew for each in self._by_group)
        for each in self._by_group:
            each.asks_anew = False
        return asks

    @property
    def impossible(self) -> dict[str, str]:
        return {owner: why for each in self._by_group for owner, why in each.impossible.items()}

    def _ready_in(self, ready: Sequence[str]) -> list[tuple[int, list[str]]]:
        among: dict[int, list[str]] = {}
        for member in ready:
            among.setdefault(self._of[member], []).append(member)
        return sorted(among.items())


def _matrix(said: DotProducts, members: int) -> Matrix | str:
    """With zeros for whom it says nothing about; words if it is none."""
    mask = mask_from_bytes(said.members)
    count = mask.bit_count()
    if mask >> members or len(said.products) != count * (count + 1) // 2:
        return f"{len(said.products)} dot products of {count} members"
    above, found = np.triu_indices(count), np.zeros((count, count))
    found[above] = found.T[above] = said.products
    rows = list(bits(mask))
    whole: Matrix = np.zeros((members, members))
    whole[np.ix_(rows, rows)] = found
    return whole


def _problem(products: Matrix) -> str:
    """Why no vectors have these dot products, or empty."""
    if not np.isfinite(products).all():
        return "dot products that are not finite"
    if (np.abs(products) > PRODUCT_MOST).any():
        return "dot products beyond what values of fp32 have"
    squares = products.diagonal()
    if (squares < 0.0).any():
        return "a negative square"
    norms = np.sqrt(squares)
    if (np.abs(products) > (1.0 + ROUNDING) * np.outer(norms, norms)).any():
        return "a dot product above the product of the norms"
    return ""
