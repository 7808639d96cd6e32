"""What the ranks of a script find out about each other before an agent starts: which values and samples are whose.

Called once when a run is joined, on all ranks at the same time, with the same outcome on all of them: a mistake ends
each of them with one sentence, and nobody waits for one that has gone.  Must not know the run: there is none yet.

    which of them are on rank 0's node   only these share memory with the agent
    what of each tensor a rank has   its box (DTensors say it), or all of it
    which ranks see the same samples the names of a mesh's dimensions, or the script says it
    which plain tensors are copies   those that begin with the same values; others are refused
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor, nn

from farflung.peer.island import nodes
from farflung.peer.island.copies import beginning
from farflung.peer.island.island import Island
from farflung.peer.island.parts import agreed_part
from farflung.peer.island.ranks import Ranks
from farflung.peer.island.sharded import is_sharded, ranks_on_one_batch, reshard
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.model_tensors import survey, unwrap
from farflung.protocol.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


def agree(model: nn.Module, data_rank: tuple[int, int] | DeviceMesh | None, island: Island) -> None:
    """UserError on every rank where something about them can't be known, or does not fit."""
    module = unwrap(model)
    reshard(module)
    places = [each.decode() for each in island.gather(nodes.here().encode())]
    island.near, island.partners = nodes.near_of(places), nodes.partners(places)
    # Chunks are the run's, and what is whose does not depend on them.
    ModelLayout.of(module, 1, island)
    said = data_rank if isinstance(data_rank, tuple) else None
    mesh = data_rank if not isinstance(data_rank, tuple) else None
    sharers = (island.rank,) if said else ranks_on_one_batch(module, island.rank, mesh)
    island.part = agreed_part(island.gather, island.rank, said, sharers)
    found = survey(module)
    refuse_unlike(found.params | found.frozen, island)
    if island.rank == 0:
        where = f" of {len(set(places))} nodes" if island.partners else ""
        log.info("each batch is read in %d parts by %d ranks%s", island.part.of, island.count, where)


def refuse_unlike(parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
    """All ranks call it, and all of them are told: of a plain tensor nobody says whether it is one or one for each.

    Whatever is a copy is made equal by the run's state; but of what was never one, a part would be lost.
    """
    plain = {name: tensor for name, tensor in parameters.items() if not is_sharded(tensor)}
    mine = [beginning(tensor) for tensor in plain.values()]
    told = [
        msgspec.msgpack.decode(each, type=list[bytes]) for each in ranks.gather(msgspec.msgpack.encode(mine))
    ]
    for at, name in enumerate(plain):
        odd = next((rank for rank, theirs in enumerate(told) if theirs[at] != told[0][at]), None)
        if odd is not None:
            raise UserError(
                f"rank {odd} and rank 0 begin with different values of {name!r}, a plain tensor, so whether they "
                "are to be copies can't be known: if so, seed all ranks alike or wrap the model; if each rank has its "
                "own (experts), make it a DTensor, sharded over a mesh"
            )
