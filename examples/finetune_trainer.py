"""A `Trainer` of transformers in a run: two lines more than without one.  Made from a config: nothing is downloaded.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script finetune_trainer.py "URL"   or: python finetune_trainer.py "URL" a.pem

To fine-tune for real, put `AutoModelForCausalLM.from_pretrained(...)` and your texts in the two places below.
"""

import sys
import tempfile

import torch

import farflung

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
except ImportError:
    print("this example needs transformers: pip install transformers accelerate", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so

CONTEXT = 32
TEXT = ("Many people, each with one small computer, train one model together. " * 200).encode()


class Windows(torch.utils.data.Dataset):
    """Here go your texts: the same on every machine."""

    def __len__(self) -> int:
        return len(TEXT) - CONTEXT

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(TEXT[place : place + CONTEXT]))
        return {"input_ids": ids, "labels": ids}


def main(url: str | None = None, identity: str | None = None) -> None:
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))  # here goes your model
    options = {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 8}
    args = TrainingArguments(
        tempfile.mkdtemp(), **options, save_strategy="no", report_to="none", use_cpu=True
    )
    trainer = Trainer(model, args, train_dataset=Windows())
    with farflung.hf_join(trainer, url, identity=identity) as run:
        trainer.train()
    trainer.save_model(f"{run.name}-model")
    print(f"{run.name}: version {run.version}, {trainer.state.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
