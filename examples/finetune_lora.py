"""SFTTrainer of TRL with a LoRA adapter of peft in a run: two lines more than without one.  Nothing is downloaded.

The adapter alone is exchanged; the model below it stays as it is, and must be the same everywhere.  Everybody runs this
script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script finetune_lora.py "URL"   or: python finetune_lora.py "URL" a.pem

To fine-tune for real, put a model's name, its tokenizer and your data set in the places below.
"""

import sys
import tempfile

import torch

import farflung

try:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
except ImportError:
    print("this example needs TRL and peft: pip install trl peft", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so

WORDS = ["<end>", "?", "is", "twice", *map(str, range(200))]


def trainer_of_adapter() -> SFTTrainer:
    # Here goes the tokenizer of your model.
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="?")
    # Here goes your data set: the same on every machine.
    data = Dataset.from_dict({"text": [f"twice {one} is {2 * one}" for one in range(100)] * 9})
    # Here goes your model.  One that is loaded is the same everywhere; this one is drawn.
    torch.manual_seed(0)
    size = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    options = {"learning_rate": 3e-3, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    args = SFTConfig(tempfile.mkdtemp(), **options, bf16=False, max_length=16)
    adapter = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=adapter)


def main(url: str | None = None, identity: str | None = None) -> None:
    trainer = trainer_of_adapter()
    with farflung.hf_join(trainer, url, identity=identity) as run:
        trainer.train()
    trainer.save_model(f"{run.name}-model")
    print(f"{run.name}: version {run.version}, {trainer.state.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
