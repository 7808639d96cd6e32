"""`[model.config]`: a model of transformers that a run names, as its config.json has it, by keys of a list.

Called by the manifest.  The table is a stranger's: a config of transformers may name code to fetch and run, so a key
that is not listed here is refused, and of the listed ones each is a number, a truth value or a word of a list.  What is
not written is filled in here, and not by the version of transformers that a peer has: equal tables are equal models.
Pure; transformers is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from farflung.protocol.caps import shown, shown_key

# Of transformers; older versions keep a mask of places times places in each layer of a GPT-2, which nobody has counted.
LEAST_VERSION = (5, 23)
# model_type, and the class that config.json names; peer/pipeline/hf.py knows the same ones in parts.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "gemma": "GemmaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
_ACTS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
HEAD_MOST = 1024
# transformers' own defaults are words of Llama 2, at which generation would stop.
NO_IDS = MappingProxyType({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
_SIZES = {
    "hidden_size": (8, 65_536),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, HEAD_MOST),
    "intermediate_size": (1, 2**18),
    "vocab_size": (2, 2**22),
    "max_position_embeddings": (2, 2**20),
    "sliding_window": (1, 2**20),
}
_NUMBERS = {
    "rope_theta": (1.0, 1e9),
    "rms_norm_eps": (1e-12, 1e-2),
    "layer_norm_epsilon": (1e-12, 1e-2),
    "initializer_range": (1e-6, 1.0),
}
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_ROTARY = ("intermediate_size", "num_key_value_heads", "rope_theta", "hidden_act")
_ANY = ("model_type", *_NEEDED, "tie_word_embeddings", "initializer_range")
_OWN = {
    "gemma": (*_ROTARY, "head_dim", "rms_norm_eps", "attention_bias"),
    "gpt2": ("activation_function", "layer_norm_epsilon"),
    "llama": (*_ROTARY, "head_dim", "rms_norm_eps", "attention_bias"),
    "mistral": (*_ROTARY, "head_dim", "rms_norm_eps", "sliding_window"),
    "olmo": (*_ROTARY, "attention_bias"),
    "olmo2": (*_ROTARY, "rms_norm_eps", "attention_bias"),
    "qwen2": (*_ROTARY, "rms_norm_eps"),
    "qwen3": (*_ROTARY, "head_dim", "rms_norm_eps", "attention_bias"),
}
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType({kind: (*_ANY, *own) for kind, own in _OWN.items()})
_NORMED_HEADS = ("olmo2", "qwen3")


class HfSizes(NamedTuple):
    """The same in the words of [model]."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied: bool


def completed(written: Mapping[str, Any]) -> dict[str, Any]:
    """The whole table.  ValueError: a line per problem."""
    if not written:
        raise ValueError('[model.config]: missing; kind = "hf" needs this table, as docs/train.md shows it')
    kind = written.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"[model.config] model_type: expected {' or '.join(ARCHITECTURES)}, found {shown(kind)}"
        )
    known = KEYS[kind]
    needed = _NEEDED if kind == "gpt2" else (*_NEEDED, "intermediate_size")
    odd = [key for key in written if key not in known]
    problems = [f"[model.config] {shown_key(key)}: no key that a run may set" for key in odd]
    if odd:
        problems[-1] += f"; for {kind} there are {', '.join(known)}"
    problems += [f"[model.config] {key}: missing" for key in needed if key not in written]
    problems += [
        f"[model.config] {key}: expected {due}, found {shown(value)}"
        for key, value in written.items()
        if key in known and (due := _due(kind, key, value))
    ]
    if problems:
        raise ValueError("\n".join(problems))
    numbers = {key: float(value) for key, value in written.items() if key in _NUMBERS}
    found = {**_defaults(kind, written, known), **written, **numbers}
    heads, width = found["num_attention_heads"], found["hidden_size"]
    keys = found.get("num_key_value_heads", heads)
    if heads % keys:
        raise ValueError(
            f"[model.config] num_key_value_heads: expected a divisor of num_attention_heads ({heads}), found {keys}"
        )
    if "head_dim" not in found and width % heads:
        raise ValueError(
            f"[model.config] hidden_size: expected a multiple of num_attention_heads ({heads}), found {width}"
        )
    size = found.get("head_dim", width // heads)
    if not 2 <= size <= HEAD_MOST or (kind != "gpt2" and size % 2):
        raise ValueError(
            f"[model.config] hidden_size: {width} in {heads} heads are {size} values each; expected an even number "
            f"from 2 to {HEAD_MOST}"
        )
    return found


def _due(kind: str, key: str, value: Any) -> str:
    """What is expected there; empty: this is."""
    if key in _SIZES:
        low, high = _SIZES[key]
        fits = type(value) is int and low <= value <= high
        return "" if fits else f"an integer >= {low} and <= {high}"
    if key in _NUMBERS:
        least, most = _NUMBERS[key]
        fits = type(value) in (int, float) and least <= value <= most
        return "" if fits else f"a number >= {least:g} and <= {most:g}"
    if key in ("hidden_act", "activation_function"):
        # Versions of transformers do not agree on which function this one is in a Gemma.
        words = [each for each in _ACTS if (kind, each) != ("gemma", "gelu")]
        return "" if value in words else " or ".join(words)
    return "" if key == "model_type" or type(value) is bool else "true or false"


def _defaults(kind: str, written: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    act = {"gemma": "gelu_pytorch_tanh", "gpt2": "gelu_new"}.get(kind, "silu")
    all_of_them = {
        "num_key_value_heads": written["num_attention_heads"],
        "rope_theta": 10_000.0,
        "hidden_act": act,
        "activation_function": act,
        "rms_norm_eps": 1e-6,
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        "sliding_window": written["max_position_embeddings"],
        "initializer_range": 0.02,
        "tie_word_embeddings": kind in ("gemma", "gpt2"),
    }
    found = {key: value for key, value in all_of_them.items() if key in known}
    width, heads = written["hidden_size"], written["num_attention_heads"]
    if "head_dim" in known and width % heads == 0:
        found["head_dim"] = width // heads
    return found


def sizes_of_config(config: Mapping[str, Any]) -> HfSizes:
    """Of a whole table."""
    kind, width, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    return HfSizes(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", width // heads),
        mlp_width=config.get("intermediate_size", 4 * width),
        vocab=config["vocab_size"],
        rope_theta=float(config.get("rope_theta", 10_000.0)),
        norm_eps=float(config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-5))),
        qk_norm=kind in _NORMED_HEADS,
        tied=config["tie_word_embeddings"],
    )


def values_by_part(config: Mapping[str, Any]) -> Iterator[int]:
    """Of the embedding, each layer, and the norm with the head."""
    sizes, kind = sizes_of_config(config), config["model_type"]
    width, queries, keys = sizes.width, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norm = {"gpt2": 2 * width, "olmo": 0}.get(kind, width)
    bias = 0
    if kind == "gpt2":
        bias = queries + 2 * keys + 2 * width + sizes.mlp_width
    elif kind == "qwen2":
        bias = queries + 2 * keys
    elif config.get("attention_bias"):
        bias = queries + 2 * keys + width
    head_norms = {"olmo2": queries + keys, "qwen3": 2 * sizes.head_dim}.get(kind, 0)
    products = 2 * width * (queries + keys) + (2 if kind == "gpt2" else 3) * width * sizes.mlp_width
    places = config["max_position_embeddings"] if kind == "gpt2" else 0
    yield (sizes.vocab + places) * width
    for _ in range(sizes.layers):
        yield products + bias + head_norms + 2 * norm
    yield norm + (0 if sizes.tied else sizes.vocab * width)


def config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a folder that `from_pretrained` and vLLM load."""
    return {"architectures": [ARCHITECTURES[config["model_type"]]], "dtype": "float32", **NO_IDS, **config}


def lacking(version: str) -> str:
    """Why such a model can't be made with this version of transformers (empty: none), and what to do; empty: it can."""
    if tuple(int(each) if each.isdecimal() else 0 for each in version.split(".")[:2]) >= LEAST_VERSION:
        return ""
    here = f"of which {version} is installed here" if version else "which is not installed here"
    least = ".".join(map(str, LEAST_VERSION))
    return f'the run\'s model is one of transformers, {here}: pip install "transformers>={least}"'
