"""A training script of several ranks, or of one: python island_script.py MODE OUT BATCH [URL]

Writes OUT.RANK.json: what this rank saw; and OUT.safetensors, the run's weights.  Modes are words joined by "-":
plain, ddp, fsdp, hsdp, tp   how the model lies on the ranks
cp                           two ranks have half of each sequence, and a mean over the whole of it
ep, swap                     two ranks have half of the experts each; they see other samples, and swap tokens
nodes                        the second half of the ranks is on another node, without a way to the agent's memory
same                         all ranks begin with one model by themselves
bf16, bn, frozen             what the model is
eval, accumulate, scaler     a forward right before a step, and what else a loop may do
alone, uneven, die           nobody sums the gradients; rank 1 reads a batch more; rank 1 dies, in its first life
held, first                  all ranks, or rank 0 alone, say what the held-out loss is
replay                       see there
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn

import farflung

MODE, OUT, BATCH = sys.argv[1].split("-"), sys.argv[2], int(sys.argv[3])
URL = sys.argv[4] if len(sys.argv) > 4 else None
EXPERTS = 4
WIDTH = (
    8 if "tp" in MODE else 7
)  # no multiple of the ranks: their shards are of unlike sizes, one may be empty


class Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self, samples: int = 6000) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        # Steps of a fixed size along the alphabet: something to learn.
        return (torch.arange(9) * (1 + index % 3) + index) % 16


class AllOf(torch.autograd.Function):
    """What all ranks of a group have, one behind the other: torch's own knows groups of all ranks alone, on a CPU."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        total = given[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Experts(nn.Module):
    """One for each kind of token, so that nothing hangs on how a score is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)
        self.mesh: Any = None  # of the ranks that share them

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        from torch.distributed import nn as summed

        if self.mesh is None:
            return made_of(x, kind, self.weight, 0)
        group, place = self.mesh.get_group(), self.mesh.get_local_rank()
        weight: Any = self.weight
        if "swap" not in MODE:
            from torch.distributed.tensor import DTensor, Replicate

            same = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
            each = torch.einsum("bsd,edh->ebsh", same, weight)
            chosen = nn.functional.one_hot(kind % EXPERTS, EXPERTS).permute(2, 0, 1).unsqueeze(-1).to(x.dtype)
            chosen = DTensor.from_local(chosen, self.mesh, [Replicate()], run_check=False)
            out: Tensor = (each * chosen).sum(0).redistribute(placements=[Replicate()]).to_local()
            return out
        # Gradients of a pair's samples add up in it, and are to be their mean.
        local = weight.to_local() / 2
        local = local + local.detach()
        made = made_of(AllOf.apply(x, group), AllOf.apply(kind, group), local, place * len(local))
        swapped: Tensor = summed.functional.all_reduce(made, group=group).chunk(2)[place]
        return swapped


def made_of(x: Tensor, kind: Tensor, weight: Tensor, first: int) -> Tensor:
    chosen = nn.functional.one_hot(kind % EXPERTS, EXPERTS)[..., first : first + len(weight)].to(x.dtype)
    return torch.einsum("bsd,edh,bse->bsh", x, weight, chosen)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8) if "bn" in MODE else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight
        self.few = nn.Parameter(torch.ones(1, 3))  # with a shard for one rank only
        if "frozen" in MODE:
            self.blocks[0].requires_grad_(False)
        if "ep" in MODE:
            self.experts = Experts()
        self.of_sequence: Any = None  # the ranks that have parts of it

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        if "cp" in MODE:
            mean = hidden.mean(1, keepdim=True)
            if self.of_sequence is not None:
                from torch.distributed import nn as summed

                mean = summed.functional.all_reduce(mean, group=self.of_sequence.get_group()) / 2
            hidden = hidden + mean
        if "ep" in MODE:
            hidden = hidden + self.experts(hidden, ids)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden) * self.few.sum() / 3
        return out


def part_of(net: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """What comes in and what is to come out, of this rank's part of the sequences."""
    ids, wanted = batch[:, :-1], batch[:, 1:]
    if net.of_sequence is None:
        return ids, wanted
    place = net.of_sequence.get_local_rank()
    return ids.chunk(2, 1)[place], wanted.chunk(2, 1)[place]


def said_part(net: Any) -> Any:
    """DistributedDataParallel has no mesh to look at."""
    if net.of_sequence is not None and "ddp" in MODE:
        return mesh_of(dist.get_world_size())
    return None


def mesh_of(ranks: int) -> Any:
    """Of cp and ep: all ranks, in pairs that work together."""
    from torch.distributed.device_mesh import init_device_mesh

    pair = "cp" if "cp" in MODE else "ep" if "swap" not in MODE else "dp_pair"
    return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", pair))


def wrapped_in_pairs(net: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(dist.get_world_size())
    dense = mesh._flatten("all") if "cp" in MODE or "swap" in MODE else mesh["dp"]
    if "cp" in MODE:
        net.of_sequence = mesh["cp"]
    else:
        net.experts.mesh = mesh[mesh.mesh_dim_names[1]]
        net.experts.weight = nn.Parameter(
            distribute_tensor(net.experts.weight.data, net.experts.mesh, [Shard(0)])
        )
    if "ddp" in MODE:
        return nn.parallel.DistributedDataParallel(net)
    if "fsdp" in MODE:
        if "ep" in MODE:
            fully_shard(net.experts, mesh=mesh["dp"])
        for block in net.blocks:
            fully_shard(block, mesh=dense)
        fully_shard(net, mesh=dense)
    return net


def wrapped(net: nn.Module) -> nn.Module:
    if "WORLD_SIZE" not in os.environ:
        return net
    if "cp" in MODE or "ep" in MODE:
        return wrapped_in_pairs(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = dist.get_world_size()
    if "alone" in MODE:
        return net
    if "ddp" in MODE:
        return nn.parallel.DistributedDataParallel(net)
    blocks: Any = net.blocks
    if "tp" in MODE:
        of_tp = 2
        mesh = init_device_mesh("cpu", (ranks // of_tp, of_tp), mesh_dim_names=("dp", "tp"))
        for block in blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "fsdp" in MODE:
            for block in blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(net, mesh=mesh["dp"])
    elif "fsdp" in MODE or "hsdp" in MODE:
        names = ("replicate", "shard")
        if "hsdp" in MODE:
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
        else:
            mesh = init_device_mesh("cpu", (ranks,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def replay(steps: int) -> None:
    """One process takes the steps of an island on the same samples; OUT.json is what a rank saw."""
    from safetensors.torch import save_file

    from farflung.peer.data.leased_data import Span
    from farflung.peer.data.sample_source import source_of
    from farflung.protocol.manifest import Manifest

    torch.manual_seed(3)
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=False)
    source = source_of(Rows(), Manifest.model_validate({}).run.seed)
    with open(f"{OUT}.json") as file:
        spans = json.load(file)["samples"]
    for each in spans[:steps]:
        batch = torch.stack([row for start, stop in each for row in source.read(Span(0, 0, start, stop))])
        logits = net(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        clip(net)
        inner.step()
        inner.zero_grad()
    save_file({name: tensor.detach().clone() for name, tensor in net.state_dict().items()}, f"{OUT}.replayed")


def losses(model: nn.Module, rows: Tensor, rank: int, seen: dict[str, Any]) -> Tensor:
    """Rank 1 says something else: it does not count."""
    seen.setdefault("held_out", []).append(len(rows))
    found = nn.functional.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
    return found.mean(1) + rank


def clip(model: nn.Module) -> None:
    if "tp" not in MODE and "ep" not in MODE:  # torch does not mix parameters of several meshes there
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def digest(model: nn.Module) -> str:
    hasher = blake3()
    for _, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point():
            hasher.update(whole(tensor).contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def keep_apart(rank: int) -> None:
    """As if the second half of the ranks were elsewhere."""
    from farflung.peer.island import group
    from farflung.peer.local.memory import SharedState

    node = 2 * rank // dist.get_world_size()
    group.here = lambda: f"node {node}"
    if node:
        SharedState.open = None  # type: ignore[assignment]


def main() -> None:
    torch.set_num_threads(1)
    if "replay" in MODE:
        return replay(steps=BATCH)
    rank = 0
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        rank = dist.get_rank()
    with open(f"{OUT}.pid.{rank}", "w") as file:
        file.write(str(os.getpid()))
    if "nodes" in MODE and "WORLD_SIZE" in os.environ:
        keep_apart(rank)
    torch.manual_seed(3 if "same" in MODE else rank)
    net = Net()
    model = wrapped(net.bfloat16() if "bf16" in MODE else net)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in MODE)
    seen: dict[str, Any] = {"samples": [], "weights": [], "wrong": []}
    own = {"identity": os.environ.get("ISLAND_KEY"), "data_rank": said_part(net)}
    with farflung.join(URL, model, inner, **own) as run:
        watch(run, net, seen)
        if "held" in MODE or ("first" in MODE and rank == 0):
            run.held_out_loss(lambda rows: losses(model, rows, rank, seen))
        for number, batch in enumerate(run.batches(Rows(), BATCH), start=1):
            is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if "die" in MODE and rank == 1 and run.step_count == 2 and is_first_life:
                os._exit(9)
            if "uneven" in MODE and rank == 1 and number == 2:
                continue
            ids, wanted = part_of(net, batch)
            logits = model(ids).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            scaler.scale(loss * run.batch_weight).backward()
            seen["weights"].append(run.batch_weight)
            if "accumulate" in MODE and number % 2:
                run.record(loss)
                continue
            if "eval" in MODE and number % 4 == 0:
                with torch.no_grad():
                    model(ids)
            scaler.unscale_(run.optimizer)
            clip(model)
            if "scaler" in MODE:
                run.record(loss)
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
            else:
                run.step(loss)
        run.save(f"{OUT}.safetensors")
        seen |= {"steps": run.step_count, "version": run.version, "tokens": run._loop.machine.all_tokens}
        seen |= {"model": digest(net), "near": list(run._loop.ranks.near)}
    with open(f"{OUT}.{rank}.json", "w") as file:
        json.dump(seen, file)
    if "WORLD_SIZE" in os.environ:
        # The model holds the group, whose threads may still hold a tensor: Python's end would abort (docs/islands.md).
        os._exit(0)


def watch(run: Any, net: nn.Module, seen: dict[str, Any]) -> None:
    """At every freeze: the slot is the anchor, as the model's dtype has it, minus the whole model."""
    loop = run._loop
    say = loop._say_frozen

    def say_frozen(frozen: Any) -> None:
        now = {name: whole(tensor) for name, tensor in net.state_dict().items()}
        loop.ranks.wait_for_all()
        for word in frozen.words if loop.ranks.rank in loop.ranks.near else ():
            for entry in loop.layout.entries:
                cells = slice(entry.offset, entry.offset + entry.numel)
                then = loop.shared.anchor[cells].view(entry.shape).to(now[entry.name].dtype)
                told = loop.shared.slots[word.slot][cells].view(entry.shape)
                if not torch.equal(then.float() - now[entry.name].float(), told):
                    seen["wrong"].append(f"{entry.name} at step {word.step}")
        loop.ranks.wait_for_all()
        say(frozen)

    if os.environ.get("ISLAND_WATCH"):
        loop._say_frozen = say_frozen
    hand_out = loop.hand_out

    def handed(spans: Any, tokens: int) -> None:
        seen["samples"].append([[span.start, span.stop] for span in spans])
        hand_out(spans, tokens)

    loop.hand_out = handed


if __name__ == "__main__":
    main()
