"""From a checkpoint to model.safetensors, or a folder of torch's DCP: the model's own names, shapes and dtypes.

Called by `farflung checkpoint export`.  Where each tensor lies in the flat vector follows from the model's
description alone, so no model code is needed.  Must not know how checkpoints are stored.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.outer_numbers import VALUE_BYTES
from farflung.protocol.process.own_files import TOKENIZER, copy_files, made_aside


@dataclass(frozen=True)
class Exported:
    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # a tied name, and the tensor that holds its values
    frozen: tuple[str, ...]  # not trained, so not part of any checkpoint


def tensors_of(model: ModelSchema, chunks: Iterable[tuple[int, bytes]]) -> Exported:
    """`chunks`: (number, parameters and moments) of every chunk, of all stages if there are any, in any order."""
    size = model.chunk_elements
    flat = torch.empty(model.chunk_count * size, dtype=torch.float32)
    for chunk, raw in chunks:
        flat[chunk * size : (chunk + 1) * size] = torch.frombuffer(
            bytearray(raw[: VALUE_BYTES * size]), dtype=torch.float32
        )
    return tensors_in(model, flat)


def tensors_in(model: ModelSchema, flat: Tensor) -> Exported:
    """Copies of what lies in the vector of all chunks."""
    tensors: dict[str, Tensor] = {}
    for spec, at in model.places():
        tensors[spec.name] = _values_of(spec, flat, at)
    return Exported(
        tensors,
        {name: of for name, of in model.aliases.items() if of in tensors},
        tuple(spec.name for spec in model.tensors if spec.kind == "frozen"),
    )


def _values_of(spec: TensorSpec, flat: Tensor, at: int) -> Tensor:
    dtype, count = getattr(torch, spec.dtype, None), prod(spec.shape)
    fits = min(spec.shape, default=0) >= 0 and 0 <= at <= len(flat) - count
    if not isinstance(dtype, torch.dtype) or not fits:
        raise UserError(f"{spec.name}: {spec.dtype} {list(spec.shape)} can't be exported; update farflung")
    return flat[at : at + count].view(spec.shape).to(dtype, copy=True)


def as_state_dict(exported: Exported, tied_once: bool) -> dict[str, Tensor]:
    """With every tied name, as `load_state_dict` wants it; or each tied weight once, as some other tools do."""
    if tied_once:
        return exported.tensors
    return exported.tensors | {name: exported.tensors[of].clone() for name, of in exported.aliases.items()}


# ---- for torch.distributed.checkpoint


def dcp_folder_is_free(folder: Path, force: bool) -> None:
    """UserError where something lies there that is no such folder, or may not be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / ".metadata").is_file():
        raise UserError(
            f"{folder} exists and is no folder of torch.distributed.checkpoint: choose another name"
        )
    if not force:
        raise UserError(f"{folder} exists; choose another folder, or add --force to overwrite it")


def write_dcp(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """A folder that `torch.distributed.checkpoint.load` reads, on any number of ranks: whole or not there.

    `name` stands in it where torch writes a random number: equal weights of a version are equal bytes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta(save_id=name)

    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():  # that this is one process is meant
            warnings.simplefilter("ignore", UserWarning)
            save(dict[str, Any](tensors), storage_writer=Writer(aside), no_dist=True)
        if folder.exists():
            shutil.rmtree(folder)
        aside.replace(folder)
    except (OSError, CheckpointException) as error:
        cause = (
            next((each for each, _ in error.failures.values()), error)
            if isinstance(error, CheckpointException)
            else error
        )
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise UserError(f"{folder}: cannot write: {why}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


# ---- hf folder ---------------------------------------------------------------------------------------------
# From a checkpoint to a folder that `from_pretrained` loads: a model of transformers, or an adapter of peft.
#
# Called by `farflung checkpoint export --hf` and `farflung publish`. What the run did not train comes from
# the folder that `--hf` names, the base: config, generation config, tokenizer, and frozen weights, of which
# the run has the hash. A model writes itself with transformers, so that its files are those of
# `run.save_pretrained`, byte for byte; an adapter needs neither transformers nor peft. Must not know how
# checkpoints are stored.

_ADAPTER_CONFIG = "adapter_config.json"
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
# What peft puts before an adapter's name, which it leaves out in files.
_OF_ADAPTER = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save)\.([^.]+)(?=\.|$)"
)


@dataclass(frozen=True)
class TrainedTensors:
    """What a run has made, under the names that files have.  `named`: that name, by the one in the run."""

    schema: ModelSchema
    exported: Exported
    named: Mapping[str, str]
    untied: bool = False  # a model in parts: its head is a matrix of its own, also where the config ties it

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = as_state_dict(self.exported, tied_once=False)
        return {self.named.get(name, name): tensor for name, tensor in found.items()}

    @property
    def frozen(self) -> list[TensorSpec]:
        """In the order of their hash."""
        found = (spec for spec in self.schema.tensors if spec.kind == "frozen")
        return sorted(found, key=lambda spec: spec.name)

    @property
    def frozen_dtypes(self) -> dict[str, torch.dtype]:
        """Under all their names."""
        dtypes: dict[str, torch.dtype] = {spec.name: getattr(torch, spec.dtype) for spec in self.frozen}
        for spec in self.schema.tensors:
            name, _, of = spec.name.partition(" = ")
            if spec.kind == "alias" and of in dtypes:
                dtypes[name] = dtypes[of]
        return {self.named.get(name, name): dtype for name, dtype in dtypes.items()}


def base_folder(named: str, with_weights: bool) -> Path:
    """Where the files lie that `named`, a folder or a model of the hub, stands for."""
    if Path(named).is_dir():
        return Path(named)
    if Path(named).exists():
        raise UserError(f"--hf {named}: name the folder that the file lies in")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"--hf {named}: there is no such folder; pip install huggingface_hub to download"
        ) from None
    wanted = [*_SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(hub.snapshot_download(named, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--hf {named}: there is no such folder, and no such model: {_first_line(error)}"
        ) from None


def write_run_folder(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], out: Path, shard_bytes: int
) -> None:
    """The same of a model that the run itself names: nothing else is needed, neither a base nor transformers."""
    shards: list[dict[str, Tensor]] = [{}]
    there = 0  # bytes of the last one
    for name, tensor in tensors.items():
        if shards[-1] and there + tensor.nbytes > shard_bytes:
            shards.append({})
            there = 0
        shards[-1][name] = tensor
        there += tensor.nbytes
    with made_aside(out) as aside:
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            of_several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"model{of_several}.safetensors"
            save_file(shard, aside / file, {"format": "pt"})
            files |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            size = sum(each.nbytes for each in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": files}
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_hf_folder(trained: TrainedTensors, base: Path, out: Path, max_shard_size: int | str) -> None:
    """Whole, or nothing: UserError if what the run trained is not what the base's config says."""
    with made_aside(out) as aside:
        if (base / _ADAPTER_CONFIG).is_file():
            _write_adapter(trained, base, aside)
        else:
            _write_model(trained, base, aside, max_shard_size)
        copy_files(base, aside, TOKENIZER)


# ---- an adapter


def _write_adapter(trained: TrainedTensors, base: Path, folder: Path) -> None:
    """As peft does: the trained values under names without the adapter's own."""
    config = json.loads((base / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{base}: an adapter of type {kind} can't be exported; use run.save_pretrained")
    tensors, adapters = {}, set()
    for name, tensor in trained.tensors.items():
        found = _OF_ADAPTER.search(name)
        if found is not None:
            adapters.add(found[2])
            name = name[: found.start()] + _in_files(found[1], name[found.end() :])
        elif config.get("bias", "none") == "none":
            raise UserError(
                f"{name} is trained and belongs to no LoRA adapter: files of peft have no place for it; use --out "
                "MODEL.safetensors without --hf"
            )
        tensors[name] = tensor
    if len(adapters) != 1:
        told = ", ".join(sorted(adapters)) or "none"
        raise UserError(f"{base} describes one adapter of peft; the run has: {told}")
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    said = {key: sorted(each) if _is_set(each) else each for key, each in config.items()}
    said["inference_mode"] = True
    (folder / _ADAPTER_CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True), encoding="utf-8")


def _in_files(child: str, rest: str) -> str:
    if child == "modules_to_save":
        return rest
    return f".{child}" + ("" if child == "lora_magnitude_vector" else rest)


def _is_set(value: object) -> bool:
    """peft writes a set as a list in any order."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# ---- a whole model


def _write_model(trained: TrainedTensors, base: Path, folder: Path, max_shard_size: int | str) -> None:
    transformers = _transformers()
    model = _empty_model(transformers, base, trained.untied)
    values = trained.tensors
    first = next(iter(values))
    if first.startswith("base_model.model."):
        raise UserError(
            f"{first}: this run trained an adapter of peft; --hf takes the folder with its {_ADAPTER_CONFIG}, which "
            "model.save_pretrained writes"
        )
    lacking = [name for name in model.state_dict() if name not in values]
    foreign = sorted(values.keys() - model.state_dict().keys())
    if foreign:
        raise UserError(
            f"{base}: its {type(model).__name__} has no {foreign[0]}, which the run trained: is it that model's folder?"
        )
    if lacking:
        values |= _of_base(model, base, lacking, trained.frozen_dtypes)
    if trained.frozen:
        _same_frozen(trained, values, base)
    try:
        model.load_state_dict(values, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"{base}: the run's model is another one: {str(error).splitlines()[-1].strip()}"
        ) from None
    model.tie_weights()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, values[name]):
            raise UserError(f"{base}: its config ties {name} to another weight; the run trained both")
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    except ValueError as error:  # such as a generation config that contradicts itself
        raise UserError(f"{base}: {' '.join(str(error).split())}") from None


def _transformers() -> Any:
    try:
        found = importlib.import_module("transformers")
    except ImportError:
        raise UserError("--hf needs transformers: pip install transformers") from None
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    return found


def _empty_model(transformers: Any, base: Path, untied: bool) -> Any:
    """On the meta device, with the base's config and generation config.  No code of the base is run."""
    try:
        config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        if untied:
            config.tie_word_embeddings = False
        kind = getattr(transformers, (config.architectures or [""])[0], None) or _causal(transformers)
        with torch.device("meta"):
            model = kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
        if (base / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(base)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--hf {base}: {_first_line(error)}") from None
    return model.eval()


def _causal(transformers: Any) -> Any:
    """What a config stands for that says no architecture: one that was made and never saved with a model."""
    return transformers.AutoModelForCausalLM


def _of_base(
    model: Any, base: Path, wanted: list[str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """What the run did not train, from the weights that the base has."""
    what = f"{wanted[0]} and {len(wanted) - 1} more" if len(wanted) > 1 else wanted[0]
    try:
        found = type(model).from_pretrained(base, config=model.config, dtype="auto").state_dict()
    except OSError:
        raise UserError(
            f"{what}: not trained, so not in the checkpoint, and {base} has no weights; --hf takes the folder or the "
            "name of the pretrained model that every peer loaded"
        ) from None
    return {name: found[name].to(dtypes.get(name, found[name].dtype)) for name in wanted}


def _same_frozen(trained: TrainedTensors, values: Mapping[str, Tensor], base: Path) -> None:
    """As the hello of every peer was compared: the raw bytes, in the order of their names in the run."""
    hasher = blake3()
    for spec in trained.frozen:
        raw = values[trained.named.get(spec.name, spec.name)].contiguous().reshape(-1).view(torch.uint8)
        hasher.update(raw.numpy().data)
    if hasher.digest() != trained.schema.frozen:
        raise UserError(
            f"{base}: its values of the frozen weights, such as {trained.frozen[0].name}, are not those of the run"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
