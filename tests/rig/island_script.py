"""A training script of several ranks, or of one: python island_script.py MODE OUT BATCH [URL]

Writes OUT.RANK.json: what this rank saw; and OUT.safetensors, the run's weights.  Modes are words joined by "-":
plain, ddp, fsdp, hsdp, tp   how the model lies on the ranks
same                         all ranks begin with one model by themselves
bf16, bn, frozen             what the model is
eval, accumulate, scaler     a forward right before a step, and what else a loop may do
alone, uneven, die           nobody sums the gradients; rank 1 reads a batch more; rank 1 dies, in its first life
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

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden) * self.few.sum() / 3
        return out


def wrapped(net: nn.Module) -> nn.Module:
    if "WORLD_SIZE" not in os.environ:
        return net
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
    from farflung.peer.data.reading import source_of
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
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
    save_file({name: tensor.detach().clone() for name, tensor in net.state_dict().items()}, f"{OUT}.replayed")


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def digest(model: nn.Module) -> str:
    hasher = blake3()
    for _, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point():
            hasher.update(whole(tensor).contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


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
    torch.manual_seed(3 if "same" in MODE else rank)
    net = Net()
    model = wrapped(net.bfloat16() if "bf16" in MODE else net)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in MODE)
    seen: dict[str, Any] = {"samples": [], "weights": [], "wrong": []}
    with farflung.join(URL, model, inner, identity=os.environ.get("ISLAND_KEY")) as run:
        watch(run, net, seen)
        for number, batch in enumerate(run.batches(Rows(), BATCH), start=1):
            is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if "die" in MODE and rank == 1 and run.step_count == 2 and is_first_life:
                os._exit(9)
            if "uneven" in MODE and rank == 1 and number == 2:
                continue
            logits = model(batch[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            scaler.scale(loss * run.batch_weight).backward()
            seen["weights"].append(run.batch_weight)
            if "accumulate" in MODE and number % 2:
                run.record(loss)
                continue
            if "eval" in MODE and number % 4 == 0:
                with torch.no_grad():
                    model(batch[:, :-1])
            scaler.unscale_(run.optimizer)
            if "tp" not in MODE:  # torch does not mix plain and sharded parameters there
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if "scaler" in MODE:
                run.record(loss)
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
            else:
                run.step(loss)
        run.save(f"{OUT}.safetensors")
        seen |= {"steps": run.step_count, "version": run.version, "tokens": run._loop.machine.all_tokens}
        seen["model"] = digest(net)
    with open(f"{OUT}.{rank}.json", "w") as file:
        json.dump(seen, file)
    if "WORLD_SIZE" in os.environ:
        dist.destroy_process_group()


def watch(run: Any, net: nn.Module, seen: dict[str, Any]) -> None:
    """At every freeze: the slot is the anchor, as the model's dtype has it, minus the whole model."""
    loop = run._loop
    say = loop._say_frozen

    def say_frozen(frozen: Any) -> None:
        now = {name: whole(tensor) for name, tensor in net.state_dict().items()}
        loop.ranks.wait_for_all()
        for word in frozen.words:
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
