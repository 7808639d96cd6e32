"""`[model.config]`: what a run may say of a model of transformers, and what is refused in a line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import UserError
from farflung.protocol.hf_config import ARCHITECTURES, completed, lacking
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import config_for_hf, values_by_part, values_of
from rig.hf_run import hf_run


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_is_not_written_is_filled_in_and_the_same_when_it_is_read_again(kind: str) -> None:
    manifest = Manifest.from_toml(hf_run(kind), "run.toml")
    assert Manifest.from_canonical(manifest.canonical()) == manifest
    assert Manifest.from_canonical(manifest.canonical()).digest == manifest.digest
    config, model = manifest.model.config, manifest.model
    assert completed(config) == config
    assert (model.layers, model.width, model.vocab, model.context) == (2, 64, 256, 32)
    assert sum(values_by_part(model)) == values_of(model) and len(list(values_by_part(model))) == 4
    told = config_for_hf(model)
    assert told["architectures"] == [ARCHITECTURES[kind]] and told.items() >= config.items()


def test_a_whole_number_where_a_fraction_is_meant_is_the_same_model() -> None:
    one, other = (hf_run("llama", f"rope_theta = {text}") for text in ("1000000", "1000000.0"))
    assert Manifest.from_toml(one, "x").digest == Manifest.from_toml(other, "x").digest


def test_a_mistral_looks_back_over_all_that_it_can_unless_its_table_says_less() -> None:
    assert Manifest.from_toml(hf_run("mistral"), "x").model.config["sliding_window"] == 64
    assert (
        Manifest.from_toml(hf_run("mistral", "sliding_window = 8"), "x").model.config["sliding_window"] == 8
    )


def test_a_run_without_such_a_table_has_the_digest_that_it_had() -> None:
    assert b"config" not in Manifest().canonical()


def test_a_model_in_stages_has_a_head_of_its_own_unless_the_table_says_otherwise() -> None:
    stages = "[pipeline]\nstages = 2\nbatch = 8\n[outer]\nstep = 'adamw'\n[merge]\npolicy = 'mean'\n"
    assert not Manifest.from_toml(hf_run("gemma", after=stages), "run.toml").model.tied
    with pytest.raises(UserError, match=r"\[model\] tied: expected false"):
        Manifest.from_toml(hf_run("gemma", "tie_word_embeddings = true", stages), "run.toml")


REFUSED = {
    "attn_implementation = 'kernels-community/x'": "attn_implementation: no key that a run may set",
    "auto_map = 'code'": "auto_map: no key that a run may set; for llama there are model_type, hidden_size",
    "hidden_act = 'tanh'": "hidden_act: expected silu or gelu or",
    "hidden_act = ['silu']": "hidden_act: expected silu or gelu or",
    "rope_theta = 'x'": 'rope_theta: expected a number >= 1 and <= 1e+09, found "x"',
    "attention_bias = 1": "attention_bias: expected true or false, found 1",
    "head_dim = 15": "hidden_size: 64 in 4 heads are 15 values each; expected an even number from 2 to 1024",
    "num_key_value_heads = 3": "num_key_value_heads: expected a divisor of num_attention_heads (4), found 3",
    "head_dim = 1026": "head_dim: expected an integer >= 2 and <= 1024, found 1026",
    "head_dim = 0x"
    + "f" * 5000: "head_dim: expected an integer >= 2 and <= 1024, found a value too long to show",
    "rope_theta = 0x"
    + "f" * 5000: "rope_theta: expected a number >= 1 and <= 1e+09, found a value too long to show",
    "attention_bias = 'true'": 'attention_bias: expected true or false, found "true"',
    "sliding_window = 8": "sliding_window: no key that a run may set",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_a_run_may_not_say_is_told_in_a_line(line: str) -> None:
    with pytest.raises(UserError) as told:
        Manifest.from_toml(hf_run("llama", line), "run.toml")
    assert "run.toml: [model.config] " in str(told.value)
    assert REFUSED[line] in str(told.value) and "Traceback" not in str(told.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("'llama'", "'bert'", "model_type: expected gemma or gpt2 or llama"),
        ("'llama'", "['llama']", "model_type: expected gemma or gpt2 or llama"),
        ("vocab_size = 256\n", "", "vocab_size: missing"),
        ("hidden_size = 64", "hidden_size = 66", "hidden_size: expected a multiple of num_attention_heads"),
        ("hidden_size = 64", "hidden_size = 2.0", "hidden_size: expected an integer >= 8 and <= 65536"),
        ("context = 32", "context = 65", "context: expected at most max_position_embeddings (64), found 65"),
        ("context = 32", "width = 32", "width: no key with kind = \"hf\""),
        ("context = 32", "preset = '15M'", "preset: no key with kind = \"hf\""),
        ("context = 32", "context = 0x" + "f" * 5000, "context: expected an integer >= 1 and <= 1048576"),
        ("[model.config]", "[model.confg]", '[model.config]: missing; kind = "hf" needs this table'),
        ("num_attention_heads = 4", "num_attention_heads = 64", "hidden_size: 64 in 64 heads are 1 values each"),
        ("'llama'", "'gemma'\nhidden_act = 'gelu'", "hidden_act: expected silu or gelu_new or"),
        ('kind = "hf"', "", '[model.config]: expected kind = "hf" in [model]'),
        ("hidden_size = 64", "hidden_size = 65000\nhead_dim = 1024", "values are too many for one piece"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told_in_a_line(old: str, new: str, told: str) -> None:
    text = hf_run("llama")
    assert old in text
    with pytest.raises(UserError) as found:
        Manifest.from_toml(text.replace(old, new).replace("layers = 2", "layers = 1024"), "run.toml")
    assert told in str(found.value)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("5.23.0", ""), ("6.0", ""), ("5.100.1.dev0", ""),
        ("5.22.9", "of which 5.22.9 is installed here: pip"), ("4.57.1", "of which 4.57.1 is installed here: pip"),
        ("", 'which is not installed here: pip install "transformers>=5.23"'),
    ],
)  # fmt: skip
def test_a_version_of_transformers_that_is_too_old_is_told_with_what_to_do(version: str, told: str) -> None:
    assert told in lacking(version) and bool(lacking(version)) == bool(told)


SMALL = {
    "model_type": "gpt2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 2,
    "max_position_embeddings": 2,
}
OTHER = ("intermediate_size", "num_key_value_heads", "head_dim", "sliding_window", "__class__")
values = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.none(), st.lists(st.integers())
)
keys = st.sampled_from([*completed(SMALL), *OTHER])


@given(st.dictionaries(keys, values), st.sampled_from(sorted(ARCHITECTURES)))
def test_whatever_a_table_holds_it_is_completed_or_refused(written: dict[str, Any], kind: str) -> None:
    try:
        found = completed({"model_type": kind, **written})
    except ValueError as error:
        assert all(line.startswith("[model.config]") for line in str(error).splitlines())
    else:
        assert completed(found) == found
