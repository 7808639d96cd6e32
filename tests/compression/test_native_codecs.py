"""The compiled codecs: the torch path's bits for any input, and every way to do without them.

What codecs must do at all is in test_codecs.py, which runs on both paths.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import native
from farflung.compression.codec import Codec, NonFinite, codec_named
from farflung.compression.native import NoLibrary, awkward_vectors, cache_folder, first_difference, library
from farflung.compression.plain_codecs import HEADER_BYTES
from farflung.protocol.errors import FrameError
from rig.waiting import LONG_S

NAMES = ("int8", "int4", "int2", "topk", "sparse")
COMPILER = next((found for found in map(shutil.which, ("cc", "gcc", "clang")) if found), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here: cc, gcc, clang")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's compiler is no compiler that hangs."""
    monkeypatch.setattr(native, "COMPILE_LIMIT_S", LONG_S)
    monkeypatch.setattr(native, "VERSION_LIMIT_S", LONG_S)


def both(name: str) -> tuple[Codec, Codec]:
    """The codec by torch, and compiled; skips where this machine has no compiled path."""
    codec = codec_named(name)
    assert codec.format.block
    used, reason = native.path_in_use(codec)
    if used != "compiled":
        pytest.skip(reason)
    return codec.using(None), codec


def outcome(work: Callable[[], object]) -> object:
    """What it returns, or in which words it refuses."""
    try:
        result = work()
    except (NonFinite, FrameError) as error:
        return type(error), str(error), getattr(error, "index", None)
    return result.view(torch.int32).tolist() if isinstance(result, Tensor) else result


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_bits(count: int, seed: int) -> Tensor:
    """Finite values of any magnitude."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.where(values.isfinite(), values, torch.zeros(()))


# ---- the same bits -----------------------------------------------------------------------------------------------

any_bits = st.integers(-(2**31), 2**31 - 1)
finite_bits = any_bits.filter(lambda bits: bits & 0x7F800000 != 0x7F800000)
special_bits = st.sampled_from(
    [0, -(2**31), 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001]
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(st.data())
def test_any_bits_are_encoded_alike(name: str, data: st.DataObject) -> None:
    """Finite ones to the same bytes; with NaN or infinities among them, the same refusal."""
    by_torch, compiled = both(name)
    block = data.draw(st.lists(st.one_of(finite_bits, special_bits, any_bits), min_size=1, max_size=40))
    repeats = data.draw(st.integers(1, 130))
    vector = floats(block).repeat(repeats)
    assert outcome(lambda: compiled.encode(vector)) == outcome(lambda: by_torch.encode(vector))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(st.data())
def test_any_payload_is_decoded_alike(name: str, data: st.DataObject) -> None:
    """Or refused in the same words, with nothing added."""
    by_torch, compiled = both(name)
    length = data.draw(st.integers(1, 200))
    payload = bytearray(by_torch.encode(random_bits(length, seed=length)))
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(HEADER_BYTES, len(payload) - 1))
        payload[place] = data.draw(st.integers(0, 255))
    weight = data.draw(st.floats(width=32, allow_nan=False, min_value=-2, max_value=2))
    assert outcome(lambda: compiled.decode(payload, length)) == outcome(
        lambda: by_torch.decode(payload, length)
    )

    def added(codec: Codec) -> tuple[object, object]:
        total = random_bits(length, seed=length + 1)
        return outcome(lambda: codec.decode_add(payload, weight, total)), outcome(lambda: total)

    assert added(compiled) == added(by_torch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [131_073, (1 << 20) + 4096 + 77])
def test_long_vectors_are_the_same(name: str, count: int) -> None:
    by_torch, compiled = both(name)
    narrow = random_bits(count, seed=3).clamp(-1e38, 1e38)  # stays finite as bf16
    usual = torch.randn(count, generator=torch.Generator().manual_seed(4))
    for vector in (random_bits(count, seed=3), narrow.bfloat16().float(), usual):
        payload = compiled.encode(vector)
        assert payload == by_torch.encode(vector)
        one, other = vector.clone(), vector.clone()
        compiled.decode_add(payload, 0.3, one)
        by_torch.decode_add(payload, 0.3, other)
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert compiled.encode(narrow.bfloat16()) == by_torch.encode(narrow.bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_bad_value_is_named(name: str) -> None:
    _, compiled = both(name)
    for place in (0, 63, 64, 4095, 4096, 70_000, (1 << 20) + 5):
        vector = torch.ones((1 << 20) + 6)
        vector[place:] = float("inf")
        vector[place] = float("nan")
        with pytest.raises(NonFinite) as caught:
            compiled.encode(vector)
        assert caught.value.index == place and caught.value.value != caught.value.value


@pytest.mark.parametrize("name", NAMES)
def test_payloads_at_odd_addresses_and_totals_with_gaps(name: str) -> None:
    by_torch, compiled = both(name)
    vector = random_bits(9001, seed=5)
    payload = by_torch.encode(vector)
    shifted = memoryview(b"x" + payload)[1:]
    assert torch.equal(compiled.decode(shifted, 9001), by_torch.decode(payload, 9001))
    gapped, whole = torch.ones(2 * 9001)[::2], torch.ones(9001)
    compiled.decode_add(shifted, 0.5, gapped)
    by_torch.decode_add(payload, 0.5, whole)
    assert torch.equal(gapped, whole)


# ---- the check before use ----------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("int8", "0x1.8p23f", "0x1.8p22f"),
        pytest.param("int8", "8454660 * 0x1p-30f", "8454661 * 0x1p-30f", marks=pytest.mark.hard),
        pytest.param("int8", "codes[i] == 0x80", "0", marks=pytest.mark.hard),
        pytest.param("int8", "largest < INFINITE", "1", marks=pytest.mark.hard),
        pytest.param(
            "int8", "values[i] *= weight", "values[i] *= weight * 1.0000002f", marks=pytest.mark.hard
        ),
        pytest.param("int4", "-108, -78", "-107, -78", marks=pytest.mark.hard),
        pytest.param(
            "int2", "level < 3.0f ? level : 3.0f", "level < 2.0f ? level : 2.0f", marks=pytest.mark.hard
        ),
        pytest.param(
            "int2",
            "third * third) + (second * second",
            "second * second) + (third * third",
            marks=pytest.mark.hard,
        ),
        ("topk", "third * third) + (second * second", "second * second) + (third * third"),
        pytest.param("topk", "ties-- > 0", "ties-- > 1", marks=pytest.mark.hard),
        pytest.param("topk", "k < repeated ? first : places[there++]", "places[k]", marks=pytest.mark.hard),
        ("sparse", "bits[i] == border && ties-- > 0", "bits[i] == border && ties-- > 1"),
    ],
)
def test_wrong_arithmetic_is_not_used(
    name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = native.SOURCE.read_text(encoding="utf-8")
    assert right in text
    source = tmp_path / "kernels.c"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    functions = native.loaded()
    assert not isinstance(functions, NoLibrary), functions
    codec = codec_named(name)
    assert codec.format.block
    assert first_difference(codec.using(None), codec.using(native.Compiled(functions, codec)))


@needs_compiler
def test_fused_operations_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the flags forbid: with it allowed, the check before use says so."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or " fma " not in cpuinfo.read_text(encoding="utf-8"):
        pytest.skip("not known to have fused operations")
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-ffp-contract=fast"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    functions = native.loaded()
    assert not isinstance(functions, NoLibrary), functions
    for codec in map(codec_named, NAMES):
        assert codec.format.block
        assert "between" in first_difference(
            codec.using(None), codec.using(native.Compiled(functions, codec))
        )


def test_the_awkward_vectors_are_the_same_each_time() -> None:
    first, second = awkward_vectors(), awkward_vectors()
    for name, vector in first.items():
        assert torch.equal(vector.view(torch.int32), second[name].view(torch.int32)), name


# ---- doing without -----------------------------------------------------------------------------------------------


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_named("int8")
    assert codec.format.block
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.compiled_for(codec) is None
    assert native.path_in_use(codec) == ("plain", "FARFLUNG_NATIVE=0 is set")


def test_without_a_library_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_named("int8")
    assert codec.format.block
    monkeypatch.setattr(native, "_choices", native._Choices())
    monkeypatch.setenv(native.SWITCH, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    used, reason = native.path_in_use(codec)
    assert used == "plain" and "XDG_CACHE_HOME" in reason
    assert codec.decode(codec.encode(torch.ones(3)), 3).tolist() == pytest.approx([1, 1, 1], rel=0.01)


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match=r"no C compiler found .*install gcc or clang"):
        library(environment(tmp_path, PATH=str(tmp_path)))
    with pytest.raises(NoLibrary, match='CC=gcc " is not a command'):
        library(environment(tmp_path, CC='gcc "'))


def test_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SOURCE", tmp_path / "kernels.c")
    with pytest.raises(NoLibrary, match="cannot read"):
        library(environment(tmp_path, CC=sys.executable))


def test_a_compiler_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    cc = script(
        tmp_path / "cc",
        '[ "$1" = --version ] && exit 0\necho note >&2\necho "error: no such CPU" >&2\nexit 1',
    )
    with pytest.raises(NoLibrary, match="failed: error: no such CPU"):
        library(environment(tmp_path, CC=cc))
    assert not any((tmp_path / "cache/farflung/kernels").iterdir())


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILE_LIMIT_S", 0.2)
    cc = script(tmp_path / "cc", '[ "$1" = --version ] && exit 0\nexec sleep 600')
    with pytest.raises(NoLibrary, match="took longer than"):
        library(environment(tmp_path, CC=cc))
    assert not any((tmp_path / "cache/farflung/kernels").iterdir())


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = script(tmp_path / "cc", '[ "$1" = --version ] && exit 0\nexit 0')  # leaves the empty file as it is
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    failed = native.loaded()
    assert isinstance(failed, NoLibrary) and "cannot be loaded" in str(failed)


# ---- the cache folder --------------------------------------------------------------------------------------------


def test_the_folder_is_the_users_own(tmp_path: Path) -> None:
    folder = cache_folder(environment(tmp_path))
    assert folder == tmp_path / "cache/farflung/kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_others_could_write_to_is_refused(tmp_path: Path) -> None:
    folder = cache_folder(environment(tmp_path))
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(NoLibrary, match="others may write to .*chmod go-w"):
            cache_folder(environment(tmp_path))
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(NoLibrary, match="everybody may write to"):
        cache_folder(environment(tmp_path))


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder(environment(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(NoLibrary, match="belongs to another user"):
        cache_folder(environment(tmp_path))


def test_links_files_and_missing_homes_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "cache/farflung"
    home.mkdir(parents=True)
    (home / "kernels").symlink_to(tmp_path)
    with pytest.raises(NoLibrary, match="is a link"):
        cache_folder(environment(tmp_path))
    (home / "kernels").unlink()
    (home / "kernels").touch()
    with pytest.raises(NoLibrary, match="cannot make the folder"):
        cache_folder(environment(tmp_path))
    with pytest.raises(NoLibrary, match="XDG_CACHE_HOME nor HOME"):
        cache_folder({})


@needs_compiler
def test_a_library_others_could_write_to_is_refused(tmp_path: Path) -> None:
    place = library(environment(tmp_path))
    assert library(environment(tmp_path)) == place
    place.chmod(0o722)
    with pytest.raises(NoLibrary, match="others may write to"):
        library(environment(tmp_path))


@needs_compiler
def test_another_compiler_makes_another_library(tmp_path: Path) -> None:
    wrapped = script(
        tmp_path / "mine", f'[ "$1" = --version ] && echo "mine 1.0" && exit\nexec {COMPILER} "$@"'
    )
    first, second = library(environment(tmp_path)), library(environment(tmp_path, CC=wrapped))
    assert first != second and first.parent == second.parent


@pytest.mark.hard
@needs_compiler
def test_two_processes_at_once(tmp_path: Path) -> None:
    code = "import os; from farflung.compression.native import library; print(library(os.environ))"
    surrounding = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=surrounding, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=LONG_S)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (place,) = said
    assert list((tmp_path / "cache/farflung/kernels").iterdir()) == [Path(place)]
