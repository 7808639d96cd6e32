"""Outer steps, codecs and merge rules of installed packages: what is refused, and that ours pass the same suite."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from farflung.collectives.arithmetic.conformance import flaw_of_codec, flaw_of_rule, flaw_of_step
from farflung.collectives.arithmetic.merge import merged_chunk, rule_of
from farflung.compression.codec import beta_of, codec_named, codec_of, feedback_for
from farflung.compression.plain_codecs import CODECS, HEADER_BYTES, Floats
from farflung.coordinator.court.proofs import StepRules, _problem_of_sum
from farflung.optim.outer import AdamW, Nesterov, PlainMean, advance, outer_step_for
from farflung.protocol.errors import FrameError, UserError
from farflung.protocol.extensions import CODEC, OUTER_STEP, codec_number, loaded, words
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import AdamWNumbers, OwnNumbers
from farflung.protocol.round_words import bits_per_value
from farflung.protocol.signed_words import Results
from rig import own_rules

RUN = '[run]\nname = "own"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Before all others, so that what is written there is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    own_rules.forget()
    yield tmp_path
    own_rules.forget()
    sys.modules.pop("own_rules", None)


@pytest.fixture
def example(folder: Path) -> Path:
    own_rules.write_example(folder)
    return folder


def manifest(text: str) -> Manifest:
    return Manifest.from_toml(RUN + text, "run.toml")


# ---- the suite -----------------------------------------------------------------------------------------------


class OurStep:
    moments = 1

    def __init__(self, step: Any, parts: int) -> None:
        self._step, self._parts = step, parts

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        advance(self._step, (theta_n, *moments), d_n, version)


def making(step: Any, parts: int) -> Callable[..., OurStep]:
    def make() -> OurStep:
        return OurStep(step, parts)

    make.moments = parts - 1  # type: ignore[attr-defined]
    return make


OUR_STEPS = {
    "nesterov": making(Nesterov(0.7, 0.9), 2),
    "mean": making(PlainMean(), 2),
    "adamw": making(AdamW(AdamWNumbers(0.05, 0.0, 3, 40, 0.9, 0.95, 0.1)), 3),
}


class OurCodec:
    def __init__(self, name: str) -> None:
        self._codec, self.memory = CODECS[name], beta_of(name)

    def body_bytes(self, count: int) -> int:
        return self._codec.payload_bytes(count) - HEADER_BYTES

    def encode(self, values_n: Floats) -> bytes:
        return self._codec.encode(values_n)[HEADER_BYTES:]

    def decode(self, body: memoryview, count: int) -> Floats:
        try:
            return self._codec.decode(self._codec.format.header(count) + bytes(body), count)
        except FrameError as error:
            raise ValueError(str(error)) from error


@pytest.mark.parametrize("name", OUR_STEPS)
def test_our_steps_keep_to_what_is_asked_of_others(name: str) -> None:
    assert flaw_of_step(OUR_STEPS[name]) == ""


@pytest.mark.parametrize("name", CODECS)
def test_our_codecs_keep_to_what_is_asked_of_others(name: str) -> None:
    assert flaw_of_codec(OurCodec(name)) == ""


def mean(values_mn: Floats, weights_m: Floats) -> Floats:
    total_n = np.zeros(values_mn.shape[1], np.float32)
    for values_n, weight in zip(values_mn, weights_m, strict=True):
        total_n += values_n * weight
    return total_n


def test_our_mean_keeps_to_what_is_asked_of_others() -> None:
    assert flaw_of_rule(mean) == ""


class Remembers:
    moments = 1

    def __init__(self) -> None:
        self.seen = 0

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        self.seen += 1
        theta_n -= d_n * np.float32(self.seen)


class Whole:
    moments = 1

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        theta_n -= d_n / max(np.float32(1e-30), np.abs(d_n).max(initial=0))


class Spoils:
    moments = 1

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        d_n *= np.float32(0.7)
        theta_n -= d_n


class Explodes:
    moments = 2

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        with np.errstate(all="ignore"):
            theta_n /= np.float32(0)


class Raises:
    moments = 2

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        raise KeyError("beta")


class ThreeMoments(Raises):
    moments = 3


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (Remembers, "does not end with the same bits twice"),
        (Whole, "a part of a chunk does not end as it does within the whole"),
        (Spoils, "it changes the result that it is given"),
        (Explodes, "a value is not finite"),
        (Raises, "it fails: KeyError: 'beta'"),
        (ThreeMoments, "its `moments` are 3: expected 1 or 2"),
    ],
)
def test_a_step_that_would_break_P1_is_told_apart(step: Any, told: str) -> None:
    assert told in flaw_of_step(step)


class Halves:
    """bf16 cut off: the plainest codec, which the flawed ones differ from in one thing each."""

    memory: float | None = 1.0

    def body_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values_n: Floats) -> bytes:
        return values_n.view(np.uint16)[1::2].tobytes()

    def decode(self, body: memoryview, count: int) -> Floats:
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)


class Longer(Halves):
    def encode(self, values_n: Floats) -> bytes:
        return super().encode(values_n) + b"\0"


class Doubled(Halves):
    def decode(self, body: memoryview, count: int) -> Floats:
        with np.errstate(all="ignore"):
            return super().decode(body, count) * np.float32(3)


class Forgets(Halves):
    memory = 2.0


class Huge(Halves):
    def body_bytes(self, count: int) -> int:
        return 2000 * count


class Counts(Halves):
    calls = 0

    def encode(self, values_n: Floats) -> bytes:
        self.calls += 1
        return bytes([self.calls]) * (2 * len(values_n))


class Trips(Halves):
    def decode(self, body: memoryview, count: int) -> Floats:
        values_n = super().decode(body, count)
        if not np.isfinite(values_n).all():
            raise OverflowError("infinite")
        return values_n


class Short(Halves):
    def decode(self, body: memoryview, count: int) -> Floats:
        values_n = super().decode(body, count)
        return values_n if np.isfinite(values_n).all() else values_n[:0]


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (Longer(), "not bytes of body_bytes"),
        (Doubled(), "what is lost is longer than what was given"),
        (Forgets(), "its `memory` is 2.0"),
        (Huge(), "body_bytes(1) is 2000"),
        (Counts(), "encode does not give the same bytes twice"),
        (Trips(), "it fails: OverflowError: infinite"),
        (Short(), "decode of arbitrary bytes"),
    ],
)
def test_a_codec_that_would_break_P1_or_a_peer_is_told_apart(codec: Halves, told: str) -> None:
    assert flaw_of_codec(Halves()) == ""
    assert told in flaw_of_codec(codec)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda values_mn, weights_m: values_mn[0].astype(np.float64), "does not give 1 fp32 values"),
        (lambda values_mn, weights_m: values_mn[0] / (1 + values_mn[0].sum()), "a part of a chunk"),
        (lambda values_mn, weights_m: np.multiply(values_mn, 2, out=values_mn)[0], "it changes"),
        (lambda values_mn, weights_m: values_mn[0] * np.float32("nan"), "a value is not finite"),
    ],
)
def test_a_rule_that_would_break_P1_is_told_apart(rule: Any, told: str) -> None:
    assert told in flaw_of_rule(rule)


# ---- what is installed ---------------------------------------------------------------------------------------


def test_a_word_that_nothing_here_knows_is_refused_with_those_that_are_known(example: Path) -> None:
    known = '"nesterov" or "mean" or "sparse" or "adamw" or "muon", found "lino": no installed package has the outer '
    with pytest.raises(UserError) as refused:
        manifest('[outer]\nstep = "lino"')
    assert str(refused.value) == f'run.toml: [outer] step: expected {known}step "lino" (there is lion)'


def test_a_word_of_run_toml_opens_nothing_but_entry_points(folder: Path) -> None:
    (folder / "opened.py").write_text("raise SystemExit('opened')")
    for word in ("opened", "opened.step", "os:system", "../opened", "Opened", "a" * 41):
        with pytest.raises(UserError, match=r"\[outer\] step: expected"):
            manifest(f'[outer]\nstep = "{word}"')
    assert "opened" not in sys.modules


def test_a_package_that_fails_is_named_in_one_line(folder: Path) -> None:
    groups = {OUTER_STEP.group: {"absent": "gone:Step", "worn": "worn:Step", "lost": "worn:Lost"}}
    own_rules.write_package(folder, "worn", groups, "class Step:\n    moments = 4\n")
    for word, told in (
        ("absent", "the outer step \"absent\" of worn 0.1 cannot be loaded: No module named 'gone'"),
        ("lost", "the outer step \"lost\" of worn 0.1 cannot be loaded: module 'worn' has no attribute"),
        ("worn", 'the outer step "worn" of worn 0.1 cannot take part in a run: its `moments` are 4'),
    ):
        with pytest.raises(UserError) as refused:
            manifest(f'[outer]\nstep = "{word}"')
        assert told in str(refused.value) and "\n" not in str(refused.value)


def test_a_word_of_two_packages_is_nobodys(example: Path) -> None:
    own_rules.write_package(example, "other", {OUTER_STEP.group: {"lion": "own_rules:Lion"}})
    own_rules.forget()
    with pytest.raises(UserError, match=r'"lion" is in (other|own_rules) 0\.1 and in (own_rules|other) 0\.1'):
        loaded(OUTER_STEP, "lion")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[merge]\npolicy = "median"', "[merge] audit: expected 0 with"),
        ('[merge]\npolicy = "median"\naudit = 0\n[round]\ngroup = 2', "[round] group: expected 0 with"),
        ('[outer]\nstep = "lion"\n[pipeline]\nbatch = 4', "with [pipeline] batch > 0, found"),
        ('[round]\ncodec = "ternary"\n[pipeline]\nbatch = 4', "with [pipeline] batch > 0, found"),
        ('[round]\ngather_codec = "ternary"', "[round] gather_codec: expected"),
    ],
)
def test_what_does_not_go_together_is_refused(example: Path, text: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        manifest(text)
    assert told in str(refused.value)


def test_a_number_that_a_step_does_not_take_is_refused(folder: Path) -> None:
    module = "class Step:\n    moments = 1\n    def step(self, *_): pass\n"
    own_rules.write_package(folder, "fixed", {OUTER_STEP.group: {"fixed": "fixed:Step"}}, module)
    assert manifest('[outer]\nstep = "fixed"').outer_numbers == OwnNumbers("fixed", None, None)
    with pytest.raises(UserError, match=r'"fixed" does not take lr = 0\.5:'):
        manifest('[outer]\nstep = "fixed"\nlr = 0.5')
    odd = "class Step:\n    moments = 1\n    def __init__(self, lr=1): 1 / (lr - 0.5)\n    def step(self, *_): pass\n"
    own_rules.write_package(folder, "odd", {OUTER_STEP.group: {"odd": "odd:Step"}}, odd)
    own_rules.forget()
    with pytest.raises(UserError, match=r'"odd" does not take lr = 0\.5: .*division by zero'):
        manifest('[outer]\nstep = "odd"\nlr = 0.5')


# ---- what they do --------------------------------------------------------------------------------------------


def test_a_step_of_a_package_is_the_same_to_a_peer_and_to_a_court(example: Path) -> None:
    of = manifest('[outer]\nstep = "lion"\nlr = 0.25\nmomentum = 0.5')
    assert Manifest.from_canonical(of.canonical()) == of
    numbers = of.outer_numbers
    assert numbers == OwnNumbers("lion", 0.25, 0.5) and numbers.parts == 2
    d_n = np.array([1.0, -2.0, 0.0, 1e30], np.float32)
    parts = [np.ones(4, np.float32), np.array([0, 8, 0, 0], np.float32)]
    advance(outer_step_for(numbers), parts, d_n, version=1)
    assert parts[0].tolist() == [0.75, 0.75, 1.0, 0.75]

    rules = StepRules(False, 0.0, 0.0, "int8", 4, own=numbers)
    signed = msgspec.msgpack.decode(msgspec.msgpack.encode(rules), type=StepRules)
    again = [np.ones(4, np.float32), np.array([0, 8, 0, 0], np.float32)]
    advance(outer_step_for(signed.outer), again, d_n, version=1)
    assert [each.tobytes() for each in again] == [each.tobytes() for each in parts]


def test_a_codec_of_a_package_travels_with_a_head_of_its_own(example: Path) -> None:
    assert words(CODEC) == ["ternary"] and bits_per_value("ternary") == 2.5
    values_n = torch.randn(300, generator=torch.Generator().manual_seed(0))
    codec = codec_named("ternary")
    payload = codec.encode(values_n)
    assert len(payload) == codec.payload_bytes(300) == HEADER_BYTES + 100
    assert codec_of(payload).name == "ternary"
    total_n = torch.zeros(300)
    codec.decode_add(payload, 0.5, total_n)
    assert torch.equal(total_n, codec.decode(payload, 300) * 0.5)
    for wrong in (payload[:-1], payload[:-1] + b"\xff", b"\0" + payload[1:]):
        with pytest.raises(FrameError):
            codec.check(wrong, 300)
    infinite = payload[:HEADER_BYTES] + np.float32("inf").tobytes() + payload[HEADER_BYTES + 4 :]
    with pytest.raises(FrameError, match="NaN or infinite"):
        codec.check(infinite, 300)


class Brittle(Halves):
    """It passes the suite, and trips over a body that the suite does not have."""

    told: Exception | None = IndexError("hostile")

    def decode(self, body: memoryview, count: int) -> Floats:
        if bytes(body[:2]) == b"\x12\x34":
            if self.told is None:
                return np.zeros(1, np.float32)
            raise self.told
        return super().decode(body, count)


def test_whatever_a_codec_of_a_package_makes_of_hostile_bytes_is_no_more_than_malformed(folder: Path) -> None:
    module = "from test_extensions import Brittle\nCODEC = Brittle()\n"
    own_rules.write_package(folder, "brittle", {CODEC.group: {"brittle": "brittle:CODEC"}}, module)
    sys.modules["test_extensions"] = sys.modules[__name__]
    codec = codec_named("brittle")
    hostile = codec.encode(torch.ones(8))[:HEADER_BYTES] + b"\x12\x34" + bytes(14)
    for told, what in ((IndexError("hostile"), "IndexError: hostile"), (None, "it does not hold 8 values")):
        Brittle.told = told
        with pytest.raises(FrameError, match=what):
            codec.check(hostile, 8)


def test_two_codecs_of_one_number_are_refused_where_a_run_names_one(folder: Path) -> None:
    numbers: dict[int, str] = {}
    one = other = ""
    for each in (f"codec{number}" for number in range(1000)):
        other = numbers.setdefault(codec_number(each), each)
        if other != each:
            one = each
            break
    module = "import test_extensions\nCODEC = test_extensions.Halves()\n"
    sys.modules["test_extensions"] = sys.modules[__name__]
    own_rules.write_package(
        folder, "alike", {CODEC.group: dict.fromkeys((one, other), "alike:CODEC")}, module
    )
    with pytest.raises(UserError, match=f'"{one}" and "{other}" are of one number: uninstall one'):
        manifest(f'[round]\ncodec = "{one}"')


def test_a_proof_in_a_codec_that_is_not_here_convicts_nobody() -> None:
    head = b"FFQ\x00" + bytes([200, 1, 0, 0]) + (8).to_bytes(4, "little") + bytes(4)
    results = Results(1, 1, ("a",), (1.0,), "fp32", b"\1", bytes(32), bytes(32))
    assert "not installed here" in _problem_of_sum(results, 0, [head + bytes(16)], [1.0])


def test_what_a_codec_of_a_package_loses_is_sent_later(example: Path) -> None:
    assert beta_of("ternary") == 1.0 and beta_of("int8") is None
    feedback, codec = feedback_for("ternary"), codec_named("ternary")
    assert feedback is not None
    delta_n = torch.randn(640, generator=torch.Generator().manual_seed(0))
    sent_n = torch.zeros(640)
    for _ in range(200):
        feedback.open(delta_n)
        codec.decode_add(feedback.encode(codec, 0, 640), 1.0, sent_n)
        feedback.settle()
    assert float((sent_n / 200 - delta_n).norm() / delta_n.norm()) < 0.05


def test_a_head_that_names_a_broken_package_is_no_payload(folder: Path) -> None:
    own_rules.write_package(folder, "worn", {CODEC.group: {"worn": "gone:CODEC"}})
    heads = [b"FFQ\x00" + bytes([number]) + b"\x01" + bytes(26) for number in range(256)]
    for head in heads:
        if head[4] not in {each.format.number for each in CODECS.values()}:
            with pytest.raises(FrameError, match="which names no codec"):
                codec_of(head)


def test_a_merge_rule_of_a_package_sees_all_contributions(example: Path) -> None:
    values = torch.tensor([[1.0, 5.0, -1.0], [2.0, -9.0, 0.0], [300.0, 6.0, 1.0]])
    payloads = [codec_named("fp32").encode(each) for each in values]
    made = merged_chunk(codec_named("fp32"), 3, payloads, [0.25, 0.25, 0.5], rule=rule_of("median"))
    assert codec_named("fp32").decode(made, 3).tolist() == [2.0, 5.0, 0.0]
    assert rule_of("robust") is None and rule_of("mean") is None


def test_what_a_rule_makes_of_hostile_values_is_finite() -> None:
    fp32 = codec_named("fp32")
    payloads = [fp32.encode(torch.full((4,), 3e38)), fp32.encode(torch.full((4,), -3e38))]
    infinite = merged_chunk(
        fp32, 4, payloads, [0.5, 0.5], rule=lambda values_mn, _: values_mn[0] * values_mn[0]
    )
    assert fp32.decode(infinite, 4).tolist() == [torch.finfo(torch.float32).max] * 4
    none = merged_chunk(
        fp32, 4, payloads, [0.5, 0.5], rule=lambda values_mn, _: values_mn[0] * np.float32("nan")
    )
    assert fp32.decode(none, 4).tolist() == [0.0] * 4
