"""Parts of decoders from `transformers`: built from a config, one layer at a time.

Owns: which model types are known, how their layers are called outside of their model, where their tensors lie in files.
Called by: users' scripts, as `farflung.hf_parts`, and `farflung checkpoint export --hf`.
Must not know: stages, the run.  `transformers` is imported when it is first used: nothing else of farflung needs it.

The parts are the embedding, each decoder layer with a rotary module of its own, and the norm with the head.  torch's
tracer can't split these models (pytorch #184361), so nothing is traced: the layers' classes are found on a model that
is built on the meta device and holds nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from farflung.peer.pipeline.parts import Part
from farflung.protocol.errors import UserError

# model_type of the config: where embedding, layers and norm lie in the model.
_ROTARY = ("model", "embed_tokens", "layers", "norm")
_PLACES = {name: _ROTARY for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "olmo2")} | {
    "gpt2": ("transformer", "wte", "h", "ln_f")
}
_HEAD = "lm_head"


def hf_parts(model: Any, *, untie: bool = False, weights: str | Path | None = None) -> list[Part]:
    """The parts of a decoder of `transformers`: Llama, Mistral, Qwen 2 and 3, Gemma 1, OLMo 1 and 2, GPT-2.

    `model`: a config, or the name or folder of one.  `untie`: many small models use the embedding as their head; in a
    pipeline the two lie with different peers, so such a model is refused unless `untie` makes the head a matrix of its
    own, which begins as a copy where `weights` are given.  `weights`: the folder of pretrained *.safetensors, or the
    name of a model to download; each part reads its own tensors only.  Without it values are drawn as transformers
    draws them.  Parts take token ids [B, T] and give logits; padding masks are not used.
    """
    transformers, config = _transformers(), _config_of(model)
    kind = config.model_type
    if config.tie_word_embeddings and not untie:
        raise UserError(
            "the model's head is tied to its embedding, and they are different parts: pass untie=True, which gives the "
            "head a matrix of its own"
        )
    with torch.device("meta"):
        # Not "eager": its layers see the future unless they are handed a mask.
        shell = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    decoder = _Decoder(shell, *_PLACES[kind], folder=None if weights is None else _folder_of(weights))
    layers = [_LayerPart(decoder, number) for number in range(config.num_hidden_layers)]
    return [_EmbedPart(decoder), *layers, _HeadPart(decoder)]


def hf_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """By the name of a tensor of `hf_parts(model)`, with its part's number in front, what `from_pretrained` calls it.

    `model`: a config, or the name or folder of one.  UserError if a name is none of these parts'.
    """
    config = _config_of(model)
    base, embed, layers, norm = _PLACES[config.model_type]
    last = config.num_hidden_layers + 1
    found = {}
    for name in names:
        number, _, inside = name.partition(".")
        child, _, rest = inside.partition(".")
        part = int(number) if number.isdecimal() else -1
        places = {
            0: {"wte": f"{base}.wte", "wpe": f"{base}.wpe"}
            if base == "transformer"
            else {"embed": f"{base}.{embed}"},
            last: {"norm": f"{base}.{norm}", "head": _HEAD},
        }.get(part, {"layer": f"{base}.{layers}.{part - 1}"} if 0 < part < last else {})
        if child not in places or not rest:
            raise UserError(
                f"{name}: no tensor of the parts that hf_parts makes of this {config.model_type} model"
            )
        found[name] = f"{places[child]}.{rest}"
    return found


def _config_of(model: Any) -> Any:
    """UserError if its type is not known here."""
    is_place = isinstance(model, str | Path)
    config = _transformers().AutoConfig.from_pretrained(str(model)) if is_place else model
    kind = getattr(config, "model_type", None)
    if kind not in _PLACES:
        raise UserError(
            f"hf_parts knows no model of type {kind!r}; it knows {', '.join(sorted(_PLACES))}; write its parts by hand"
        )
    return config


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError("hf_parts needs transformers: pip install transformers") from None


def _folder_of(weights: str | Path) -> Path:
    if Path(weights).is_dir():
        return Path(weights)
    hub = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(str(weights), allow_patterns=["*.safetensors", "*.json"]))


# ---- what the parts are built from


@dataclass(frozen=True)
class _Decoder:
    shell: Any  # the whole model on the meta device: its classes and its config, no values
    base: str
    embed: str
    layers: str
    norm: str
    folder: Path | None

    @property
    def config(self) -> Any:
        return self.shell.config

    def of(self, name: str) -> Any:
        return getattr(getattr(self.shell, self.base), name)

    def filled(self, module: nn.Module, places: Mapping[str, str]) -> nn.Module:
        """First values.  `places`: of the module's children, the name that files know them by."""
        module.apply(self.shell._init_weights)
        on_meta = any(parameter.is_meta for parameter in module.parameters())
        if self.folder is not None and not on_meta:
            _read_into(module, places, self.folder, self.base)
        return module


@dataclass(frozen=True)
class _EmbedPart:
    decoder: _Decoder

    def __call__(self) -> nn.Module:
        found, config = self.decoder.of(self.decoder.embed), self.decoder.config
        if self.decoder.base == "transformer":
            return self.decoder.filled(_Positioned(config), {"wte": "wte", "wpe": "wpe"})
        if config.model_type == "gemma" and not hasattr(found, "embed_scale"):
            raise UserError(
                "this version of transformers scales Gemma's embedding outside of it; take 5.0 or newer"
            )
        scale = {"embed_scale": config.hidden_size**0.5} if hasattr(found, "embed_scale") else {}
        embed = type(found)(found.num_embeddings, found.embedding_dim, found.padding_idx, **scale)
        return self.decoder.filled(_NamedStage(embed=embed), {"embed": self.decoder.embed})


@dataclass(frozen=True)
class _LayerPart:
    decoder: _Decoder
    number: int

    def __call__(self) -> nn.Module:
        decoder = self.decoder
        layer = type(decoder.of(decoder.layers)[self.number])(decoder.config, self.number)
        has_rotary = decoder.base == "model"
        rotary = type(decoder.of("rotary_emb"))(decoder.config) if has_rotary else None
        # Qwen's layers know whether they look back so far only; Mistral's all do.
        own = getattr(layer.self_attn, "sliding_window", None) if has_rotary else None
        window = own or (decoder.config.sliding_window if decoder.config.model_type == "mistral" else None)
        return decoder.filled(_Layer(layer, rotary, window), {"layer": f"{decoder.layers}.{self.number}"})


@dataclass(frozen=True)
class _HeadPart:
    decoder: _Decoder

    def __call__(self) -> nn.Module:
        decoder, config = self.decoder, self.decoder.config
        kind = type(decoder.of(decoder.norm))
        sizes = {"eps": decoder.of(decoder.norm).eps} if kind is nn.LayerNorm else _norm_sizes(config, kind)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        module = _Head(kind(config.hidden_size, **sizes), head)
        tied = decoder.embed if config.tie_word_embeddings else _HEAD
        return decoder.filled(module, {"norm": decoder.norm, "head": tied})


def _norm_sizes(config: Any, kind: type[nn.Module]) -> dict[str, float]:
    # OLMo 1 has a LayerNorm without an epsilon of its own.
    return {} if kind.__name__ == "OlmoLayerNorm" else {"eps": config.rms_norm_eps}


# ---- the modules


class _NamedStage(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        return x


class _Positioned(nn.Module):
    """GPT-2's: tokens, places, dropout."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        return x


class _Layer(nn.Module):
    def __init__(
        self, layer: nn.Module, rotary: Callable[[Tensor, Tensor], Any] | None, window: int | None
    ) -> None:
        super().__init__()
        self.layer, self.rotary, self._window = layer, rotary, window

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        extra = {}
        if self.rotary is not None:
            extra = {"position_ids": places, "position_embeddings": self.rotary(x, places)}
        gives = self.layer(x, attention_mask=self._mask(places), use_cache=False, **extra)
        y: Tensor = gives[0] if isinstance(gives, tuple) else gives
        return y

    def _mask(self, places: Tensor) -> Tensor | None:
        """None where attention looks at everything before: the layer then takes the fast way."""
        if self._window is None or places.shape[1] <= self._window:
            return None
        back = places.transpose(0, 1) - places
        seen: Tensor = (back >= 0) & (back < self._window)
        return seen[None, None]


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


# ---- pretrained tensors


def _read_into(module: nn.Module, places: Mapping[str, str], folder: Path, base: str) -> None:
    files = _files_by_name(folder)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            child, _, rest = name.partition(".")
            if child not in places:
                continue
            wanted = ".".join(filter(None, (places[child], rest)))
            found = next((n for n in (f"{base}.{wanted}", wanted) if n in files), None)
            if found is None:
                raise UserError(f"{folder}: no tensor {base}.{wanted} in its *.safetensors")
            with safe_open(files[found], framework="pt") as file:
                values = file.get_tensor(found)
            if values.shape != parameter.shape:
                raise UserError(
                    f"{folder}: {found} is {list(values.shape)}, the config says {list(parameter.shape)}"
                )
            parameter.copy_(values)


def _files_by_name(folder: Path) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            named |= dict.fromkeys(file.keys(), path)
    if not named:
        raise UserError(f"{folder} holds no *.safetensors")
    return named
