"""A model of torchtitan in a run: its llama3, small, in a loop of our own; and a folder that torchtitan goes on from.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script titan_model.py "URL"   or: python titan_model.py "URL" a.pem

torchtitan's own Trainer shards every model (FSDP2), on one GPU too, which a peer can't yet: so the loop is ours.
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

import farflung

try:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
except ImportError:
    print("this example needs torchtitan: pip install torchtitan", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so

CONTEXT = 32
TEXT = ("Many people, each with one small computer, train one model together. " * 200).encode()
# Here go your tokens, such as farflung.TokenShards(place, length=CONTEXT + 1): the same on every machine.
WINDOWS = [torch.tensor(list(TEXT[at : at + CONTEXT + 1])) for at in range(len(TEXT) - CONTEXT)]


def llama() -> torch.nn.Module:
    config = model_registry("debugmodel").model  # here goes your flavor, such as "8B"
    for layer in config.layers:  # FlexAttention, which it has otherwise, learns on a GPU alone
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


def main(url: str | None = None, identity: str | None = None) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with farflung.join(url, model, optimizer, identity=identity) as run:
        for windows in run.batches(WINDOWS):
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
            loss.backward()
            run.step(loss)
        # The model is the run's now. torchtitan: --checkpoint.initial_load_path, ....initial_load_model_only
        dcp.save(model.state_dict(), checkpoint_id=f"{run.name}-titan", no_dist=True)
        print(f"{run.name}: version {run.version}, {run.step_count} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
