"""Fine-tunes a transformers model together with others.  Made from a config: nothing is downloaded.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script finetune_hf.py "URL"   or: python finetune_hf.py "URL" a.pem

To fine-tune for real, put `AutoModelForCausalLM.from_pretrained(...)` and your texts in the two places below.
"""

import sys

import torch

import farflung

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("this example needs transformers: pip install transformers", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so

CONTEXT = 32
TEXT = ("Many people, each with one small computer, train one model together. " * 200).encode()


class Windows(torch.utils.data.Dataset):
    """Here go your texts: the same on every machine, each sample a row of token ids."""

    def __len__(self) -> int:
        return len(TEXT) - CONTEXT

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor(list(TEXT[place : place + CONTEXT]))


def main() -> None:
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)  # here goes your model
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    url = sys.argv[1] if len(sys.argv) > 1 else None
    identity = sys.argv[2] if len(sys.argv) > 2 else None
    with farflung.join(url, model, inner, identity=identity) as run:
        for batch in run.batches(Windows()):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            run.step(loss)
        run.save(f"{run.name}.safetensors")
        print(f"{run.name}: version {run.version}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
