"""The model that a run names: the built-in one, or one of transformers made from `[model.config]`.

Called by the trainers and by `farflung generate`.  transformers is asked for a class of its own and given numbers: the
manifest has let nothing else through, and nothing is fetched.  A batch is the run's: every peer learns from as many
samples in a step, whatever its machine, so its gradient is made of as many rows at once as the device has room for.
Must not know rounds, or where tokens come from.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from farflung.peer.builtin.llama import Llama, nats_a_token, nats_by_row, sizes_of
from farflung.peer.builtin.sizes import StepShape
from farflung.protocol.errors import UserError
from farflung.protocol.hf_config import NO_IDS, lacking
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.process.log_lines import LineWriter

# GPT-2 alone drops values by default; at the first pass over a large text that costs more than it gains.
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


class HfModel(nn.Module):
    """One of transformers, with the methods of Llama that training and writing need."""

    def __init__(self, sizes: ModelSection, seed: int) -> None:
        super().__init__()
        self.sizes = sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the same values here; what the run begins with are its founder's
            self.module = _transformers().AutoModelForCausalLM.from_config(
                hf_config_of(sizes), attn_implementation="sdpa", dtype=torch.float32
            )
        self._recompute = False

    @property
    def recompute(self) -> bool:
        return self._recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        if wanted != self._recompute:
            self._recompute = wanted
            if wanted:
                self.module.activation_checkpointing_enable({"use_reentrant": False})
            else:
                self.module.activation_checkpointing_disable()

    def loss(self, window: Tensor) -> Tensor:
        """window [B, T + 1] int64: each token is to predict the one after it.  Mean nats a token, in fp32."""
        return nats_a_token(self.module.lm_head, self._hidden(window), window[:, 1:])

    def losses(self, window: Tensor) -> Tensor:
        """The same of each row by itself [B]."""
        return nats_by_row(self.module.lm_head, self._hidden(window), window[:, 1:])

    def _hidden(self, window: Tensor) -> Tensor:
        given = self.module.base_model(input_ids=window[:, :-1], use_cache=False)
        found: Tensor = given.last_hidden_state
        return found

    def past_of(self, count: int, device: torch.device) -> Any:
        return _transformers().DynamicCache()

    def next_logits(self, ids: Tensor, past: Any) -> Tensor:
        given = self.module(input_ids=ids, past_key_values=past, use_cache=True)
        logits: Tensor = given.logits[0, -1]
        return logits.float()


NamedModel = Llama | HfModel


def model_of(manifest: Manifest) -> NamedModel:
    """With its first values.  UserError where the run's model or data comes with a script, or a package is missing."""
    sizes, seed = sizes_of(manifest), manifest.run.seed
    return HfModel(sizes, seed) if sizes.config else Llama(sizes, seed)


def with_values(sizes: ModelSection, tensors: dict[str, Tensor]) -> NamedModel:
    """Under the names that transformers gives them; a head that is tied may be missing."""
    values = {name: each.float() for name, each in tensors.items()}
    if sizes.config:
        found = HfModel(sizes, 0)
        try:
            lacking, foreign = found.module.load_state_dict(values, strict=False)
        except RuntimeError as error:
            raise UserError(
                f"these are no weights of the run's model: {str(error).splitlines()[-1].strip()}"
            ) from None
        if foreign or set(lacking) - ({"lm_head.weight"} if sizes.tied else set()):
            odd = ", ".join([*foreign, *lacking][:3])
            raise UserError(f"these are no weights of the run's model: {odd}")
        return found
    with torch.device("meta"):
        model = Llama(sizes)
    model.load_state_dict(values, strict=False, assign=True)
    if sizes.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def hf_config_of(sizes: ModelSection) -> Any:
    """As transformers has it."""
    config = dict(sizes.config)
    kind = config.pop("model_type")
    dropout = _NO_DROPOUT if kind == "gpt2" else {}
    return _transformers().AutoConfig.for_model(kind, **config, **NO_IDS, **dropout)


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # it has nothing to fetch
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise UserError(lacking("")) from None
        why = str(error).splitlines()[0]
        raise UserError(f"transformers, of which the run's model is, can't be loaded here: {why}") from None
    if problem := lacking(str(found.__version__)):
        raise UserError(problem)
    return found


# ---- the gradient of a batch ---------------------------------------------------------------------------------


class MicroBatches:
    """Pieces of a batch add up to the same gradient, but for the order of a sum."""

    def __init__(
        self,
        model: NamedModel,
        shape: StepShape,
        precise: Callable[[], AbstractContextManager[object]],
        say: LineWriter,
    ) -> None:
        """`precise`: around each forward pass.  `say`: to this peer's owner."""
        self._model, self._precise, self._say = model, precise, say
        self._rows, model.recompute = shape

    def tell(self, batch: int) -> None:
        """Where it is not the whole batch at once."""
        if self._rows < batch or self._model.recompute:
            again = ", and each layer again on the way back" if self._model.recompute else ""
            self._say(f"computes {self._rows} of a batch's {batch} rows at once{again}: more does not fit")

    def backward(self, batch: Tensor) -> Tensor:
        """The mean loss of the batch [B, T + 1], whose gradient is in the parameters."""
        while True:
            try:
                return self._backward(batch)
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            # Behind the handler: until its end the traceback holds all that the forward pass had kept.
            self._shrink(batch.shape[0], problem)

    def _backward(self, batch: Tensor) -> Tensor:
        mean = torch.zeros((), device=batch.device)
        for rows in torch.split(batch, self._rows):
            share = len(rows) / len(batch)
            with self._precise():
                loss = self._model.loss(rows)
            torch.autograd.backward(loss if share == 1.0 else loss * share)
            mean += loss.detach() * share
        return mean

    def _shrink(self, batch: int, problem: str) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None  # of the pieces before: the batch is computed anew
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._rows > 1:
            self._rows = -(-min(self._rows, batch) // 2)
        elif not self._model.recompute:
            self._model.recompute = True
        else:
            raise UserError(
                f"one row of {self._model.sizes.context} tokens does not fit the memory of this device, although "
                f"layers are computed again on the way back: {problem}"
            )
        self.tell(batch)
