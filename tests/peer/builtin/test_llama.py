"""The built-in model: reproducible however it is cut, causal, able to learn, and the same as transformers' own."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.builtin.llama import LOGIT_ROWS, Llama, Past, continued, evaluate, parts_of
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import ModelSection
from farflung.protocol.model_schema import PRESETS, config_for_hf, tensors_of, values_by_part, values_of

SMALL = ModelSection(layers=2, width=32, heads=2, context=16)
SHAPES = {
    "tied": SMALL,
    "grouped, with a head of its own": ModelSection(
        layers=2, width=32, heads=4, kv_heads=2, context=16, vocab=99, tied=False
    ),
    "Qwen 3": ModelSection(layers=3, width=48, heads=4, head_dim=16, mlp_width=80, context=16, qk_norm=True),
    "wide heads": ModelSection(
        layers=1, width=24, heads=3, kv_heads=1, head_dim=32, context=16, rope_theta=5e5
    ),
}


def flat_of(seed: int) -> Tensor:
    model = Llama(SMALL, seed)
    layout = ModelLayout.of(model, 256)
    flat = torch.zeros(layout.total_elements)
    layout.write_anchor(model, flat)
    return flat


def rows(sizes: ModelSection, count: int = 3) -> Tensor:
    """[count, context + 1]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, sizes.vocab, (count, sizes.context + 1), generator=generator)


# ---- first values --------------------------------------------------------------------------------------------


def test_first_values_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = flat_of(seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(flat_of(seed=7), first)
    assert not torch.equal(flat_of(seed=8), first)


def test_the_first_values_have_the_usual_spread_and_those_that_add_to_the_residual_a_smaller_one() -> None:
    model = Llama(ModelSection(layers=8, width=64))
    values = dict(model.named_parameters())
    assert values["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["model.embed_tokens.weight"].mean().item() == pytest.approx(0.0, abs=0.001)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert values[f"model.layers.0.{name}.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(values["model.norm.weight"], torch.ones(64))


def test_a_model_on_the_meta_device_takes_no_memory_and_no_time() -> None:
    with torch.device("meta"):
        model = Llama(ModelSection(preset="7B"))
    assert sum(each.numel() for each in model.parameters()) == 6_738_415_616


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_has_the_values_that_were_reckoned_on_paper(preset: str) -> None:
    sizes = ModelSection(preset=preset)
    with torch.device("meta"):
        model = Llama(sizes)
        parts = [sum(each.numel() for each in Llama(sizes, 0, n, n + 1).parameters()) for n in range(2)]
    assert sum(each.numel() for each in model.parameters()) == values_of(sizes)
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == tensors_of(sizes)
    assert parts == [*islice(values_by_part(sizes), 2)]


# ---- what it computes ----------------------------------------------------------------------------------------


def test_embedding_and_head_are_one_matrix_where_the_run_ties_them() -> None:
    model = Llama(SMALL)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ModelLayout.of(model, 256).aliases == (("lm_head.weight", "model.embed_tokens.weight"),)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_the_loss_is_that_of_the_logits(sizes: ModelSection) -> None:
    model, window = Llama(sizes), rows(sizes)
    logits = model(window[:, :-1])
    assert logits.shape == (3, 16, sizes.vocab)
    due = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    torch.testing.assert_close(model.loss(window), due)
    assert due.item() == pytest.approx(math.log(sizes.vocab), rel=0.1)


def test_logits_of_many_rows_come_in_pieces_and_give_the_same_loss_and_gradient() -> None:
    model = Llama(SMALL)
    window = rows(SMALL, LOGIT_ROWS // SMALL.context + 9)
    x = model.hidden(window[:, :-1])
    due = torch.nn.functional.cross_entropy(model.lm_head(x).flatten(0, 1), window[:, 1:].flatten())
    due.backward()
    whole = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    found = model.loss(window)
    found.backward()
    torch.testing.assert_close(found, due)
    for one, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one)


def test_no_token_sees_the_ones_after_it() -> None:
    model = Llama(SMALL)
    tokens = rows(SMALL, 1)[:, :-1]
    changed = tokens.clone()
    changed[0, 9] += 1 if tokens[0, 9] < 255 else -1
    with torch.no_grad():
        same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens in a row do not fit the model's context of 16"):
        Llama(SMALL).loss(torch.zeros(1, 18, dtype=torch.int64))


@pytest.mark.parametrize("name", ["grouped, with a head of its own", "Qwen 3"])
def test_P13_its_parts_one_after_the_other_are_the_whole_to_the_bit(name: str) -> None:
    sizes = SHAPES[name].model_copy(update={"tied": False})
    whole, parts = Llama(sizes, 7), [build() for build in parts_of(sizes, 7)]
    values = dict(whole.named_parameters())
    named = [(name, each) for part in parts for name, each in part.named_parameters()]
    assert {name for name, _ in named} == values.keys() and len(named) == len(values)
    assert all(torch.equal(each, values[name]) for name, each in named)
    x = tokens = rows(sizes)[:, :-1]
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))


def test_products_in_bf16_give_about_the_same_loss_and_gradients_in_fp32() -> None:
    model, window = Llama(SHAPES["Qwen 3"]), rows(SHAPES["Qwen 3"], 8)
    due = model.loss(window).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(window)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(due, abs=1e-2)
    assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {torch.float32}


def test_it_learns() -> None:
    corpus = load_corpus(max_bytes=400_000)
    windows = ByteWindows(corpus.train, SMALL.context)
    model = Llama(SMALL)
    before = evaluate(model, corpus.held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in islice(DataLoader(windows, batch_size=16), 40):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    assert evaluate(model, corpus.held_out) < before - 1.0


def test_evaluation_is_repeatable_and_leaves_the_model_as_it_was() -> None:
    model = Llama(SMALL)
    data = torch.arange(1000).to(torch.uint8)
    first = evaluate(model, data, windows=5, batch=2)
    assert evaluate(model, data, windows=5, batch=5) == pytest.approx(first, rel=1e-6)
    assert evaluate(model, data, windows=5, batch=2) == first
    assert model.training
    assert model.model.embed_tokens.weight.grad is None
    with pytest.raises(UserError, match="cannot cut 5 windows of 17 tokens out of 16"):
        evaluate(model, data[:16], windows=5)


# ---- text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_id_by_id_it_computes_what_the_whole_row_does(name: str) -> None:
    sizes = SHAPES[name]
    model, ids = Llama(sizes, 3), rows(sizes, 1)[:, :-1]
    with torch.no_grad():
        whole = model(ids)[0]
        past = Past(sizes, sizes.context, torch.device("cpu"))
        found = [model.next_logits(ids[:, :5], past)]
        found += [model.next_logits(ids[:, at : at + 1], past) for at in range(5, sizes.context)]
    assert past.count == sizes.context
    assert torch.allclose(torch.stack(found), whole[4:], atol=1e-5)


def test_one_seed_makes_one_text_and_another_seed_another() -> None:
    model = Llama(SMALL, 3)

    def text(seed: int, temperature: float = 1.0) -> list[int]:
        return list(continued(model, [1, 2, 3], 12, temperature, seed))

    state = torch.random.get_rng_state()
    assert text(1) == text(1) != text(2) and len(text(1)) == 12
    assert text(1, temperature=0.0) == text(2, temperature=0.0) != text(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_text_ends_where_a_document_does() -> None:
    model = Llama(SMALL, 3)
    whole = list(continued(model, [1, 2, 3], 12, 1.0, 1))
    end = whole[6]
    assert list(continued(model, [1, 2, 3], 12, 1.0, 1, frozenset({end}))) == whole[: whole.index(end)]


# ---- beside transformers (make adapters) -----------------------------------------------------------------------


def theirs(sizes: ModelSection, values: dict[str, Tensor]) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**config_for_hf(sizes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    lacking, foreign = model.load_state_dict(values, strict=False)
    assert (set(lacking) <= {"lm_head.weight"}, foreign) == (True, [])
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_llama_gives_the_logits_and_gradients_of_transformers_own(sizes: ModelSection) -> None:
    ours = Llama(sizes, 3)
    with torch.no_grad():
        for each in ours.parameters():
            each.mul_(3.0 if each.dim() > 1 else 1.1)  # larger than at first, where little differs
    other = theirs(sizes, {name: each.detach() for name, each in ours.state_dict().items()})
    tokens = rows(sizes)[:, :-1]
    mine, its = ours(tokens), other(tokens).logits
    assert mine.abs().max() > 1.0 and (mine - its).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        windows = rows(sizes, 8)
        half = ours.loss(windows)
    logits = other(windows[:, :-1]).logits.flatten(0, 1)
    assert abs(half - torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())) < 1e-2


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_a_llama_folder_is_loaded_by_from_pretrained_with_no_name_missing_or_left_over(
    sizes: ModelSection, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Llama(sizes, 3)
    theirs(sizes, dict(ours.state_dict())).save_pretrained(tmp_path)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    values = ours.state_dict()
    assert all(torch.equal(each, values[name]) for name, each in again.state_dict().items())


def test_greedy_text_is_that_of_transformers_own() -> None:
    transformers = pytest.importorskip("transformers")
    for sizes in SHAPES.values():
        mine = Llama(sizes, 3)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.mul_(3.0)
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config_for_hf(sizes))
        )
        theirs.load_state_dict(mine.state_dict())
        ids = rows(sizes, 1)[:, :4]
        made = theirs.eval().generate(ids, max_new_tokens=sizes.context - 4, do_sample=False)
        assert list(continued(mine, ids[0].tolist(), sizes.context - 4, 0.0, 0)) == made[0, 4:].tolist()
