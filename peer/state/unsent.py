"""What this peer learned and a coarse codec has not sent yet: kept on its own disk while its agent is away.

Written in the arithmetic when the agent ends in order, and taken up before the next one contributes first, once:
reading removes the file.  Each version that was made meanwhile takes some of its worth, and of a state that the run has
gone back from nothing is taken up.  A peer that is killed loses it, and a disk that fails is told: it is a peer's own
memory, and nobody else depends on it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from farflung.compression.codec import share_after
from farflung.peer.state.keeping_state import name_on_disk
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.process import own_files
from farflung.protocol.run_terms import Attached

log = logging.getLogger(__name__)

SUFFIX = ".unsent"


class UnsentPart(NamedTuple):
    """Of a fragment."""

    era: int
    version: int
    residual_n: Tensor


class Unsent:
    def __init__(self, left: dict[int, UnsentPart] | None = None) -> None:
        self.left = left or {}  # by fragment

    @staticmethod
    def of(state: OuterState, era: int, versions: Mapping[int, int]) -> Unsent:
        """`versions`: of each fragment that is whole."""
        found = state.unsent().items()
        return Unsent(
            {number: UnsentPart(era, versions[number], each) for number, each in found if number in versions}
        )

    def take_up(self, state: OuterState, fragment: int, era: int, version: int) -> None:
        """Before a contribution at this version."""
        left = self.left.pop(fragment, None)
        if left is not None and left.era == era and version >= left.version:
            state.take_up(fragment, left.residual_n, share_after(version - left.version))


class UnsentWork:
    """Every method is called in the arithmetic."""

    def __init__(self, folder: Path, peer: str, attached: Attached, may_keep: bool = True) -> None:
        self._path = folder / f"{name_on_disk(attached, peer)}{SUFFIX}"
        self._sizes = {each.number: each.count * attached.model.chunk_elements for each in attached.held}
        self._is_kept = may_keep
        self.of_before = Unsent()

    def read(self) -> None:
        if not self._is_kept:
            return
        try:
            # Of peers that never came back, and of a write of this one that was cut short.
            for path in (
                *own_files.left_behind(self._path),
                *self._path.parent.glob(f".{self._path.name}.*"),
            ):
                path.unlink(missing_ok=True)
            if not self._path.exists():
                return
            with safe_open(self._path, framework="pt") as file:
                told = file.metadata() or {}
                found = {int(name): self._left(file.get_tensor(name), name, told[name]) for name in told}
            self.of_before = Unsent(found)
            self._path.unlink(missing_ok=True)
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("what was not sent yet when this peer left is lost: %s: %s", self._path, error)
            with contextlib.suppress(OSError):  # it is overwritten at the next end
                self._path.unlink(missing_ok=True)

    def _left(self, residual_n: Tensor, name: str, told: str) -> UnsentPart:
        era, version = map(int, told.split())
        if residual_n.shape != (self._sizes.get(int(name)),):
            raise ValueError(f"fragment {name} has {list(residual_n.shape)} values")
        return UnsentPart(era, version, residual_n)

    def write(self, state: OuterState, era: int, versions: Mapping[int, int]) -> None:
        """With what no contribution has taken up since it was read."""
        left = self.of_before.left | Unsent.of(state, era, versions).left
        if not left or not self._is_kept:
            return
        # Half of the bytes: it is what was left over, and 8 bits of fraction are enough of that.
        tensors = {str(number): each.residual_n.to(torch.bfloat16) for number, each in left.items()}
        told = {str(number): f"{each.era} {each.version}" for number, each in left.items()}
        try:
            own_files.replaced(self._path, save(tensors, told))
        except OSError as error:
            log.warning("what was not sent yet is lost, since it cannot be kept: %s: %s", self._path, error)
