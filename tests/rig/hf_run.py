"""run.toml of a small model of transformers."""

from __future__ import annotations


def hf_run(kind: str, config: str = "", after: str = "") -> str:
    """`config`: more lines of [model.config]; `after`: sections behind it."""
    rotary = "" if kind == "gpt2" else "intermediate_size = 96\n"
    return (
        f"[model]\nkind = \"hf\"\ncontext = 32\n[model.config]\nmodel_type = '{kind}'\nhidden_size = 64\n"
        "num_hidden_layers = 2\nnum_attention_heads = 4\nvocab_size = 256\nmax_position_embeddings = 64\n"
        f"{rotary}{config}\n{after}"
    )
