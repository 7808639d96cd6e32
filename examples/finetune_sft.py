"""SFTTrainer of TRL in a run: two lines more than without one.  Made from a config: nothing is downloaded.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script finetune_sft.py "URL"   or: python finetune_sft.py "URL" a.pem

To fine-tune for real, put a model's name, its tokenizer and your data set in the places below.
"""

import sys
import tempfile

import farflung

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
except ImportError:
    print("this example needs TRL: pip install trl", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so

CONTEXT = 64


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """Here goes the tokenizer of your model: the same on every machine."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def questions() -> Dataset:
    """Here goes your data set: the same on every machine."""
    pairs = [(one, other) for one in range(30) for other in range(30)]
    asked = [f"What is {one} and {other}?" for one, other in pairs]
    return Dataset.from_dict({"prompt": asked, "completion": [f" {a + b}." for a, b in pairs]})


def main(url: str | None = None, identity: str | None = None) -> None:
    tokenizer = tokenizer_of_bytes()
    size = {"vocab_size": len(tokenizer), "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=256, eos_token_id=256))  # here goes your model
    options = {"learning_rate": 3e-3, "per_device_train_batch_size": 8, "max_length": CONTEXT}
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
    args = SFTConfig(tempfile.mkdtemp(), **options, **quiet)
    trainer = SFTTrainer(model, args, train_dataset=questions(), processing_class=tokenizer)
    with farflung.hf_join(trainer, url, identity=identity) as run:
        trainer.train()
    trainer.save_model(f"{run.name}-model")
    print(f"{run.name}: version {run.version}, {trainer.state.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
