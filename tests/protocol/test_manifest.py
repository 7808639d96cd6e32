"""The run manifest: defaults, canonical bytes, and messages that say what to mend."""

from __future__ import annotations

import json
import re
import tomllib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.compression.codec import AUTO, codec_names
from farflung.console.run_toml import SHORT, TEMPLATE, description
from farflung.protocol.errors import UserError
from farflung.protocol.limits import CHUNKS_PER_FRAGMENT
from farflung.protocol.manifest import CODECS, HUGE, MAX_MANIFEST_BYTES, Manifest, Periods, ResultCodecName
from farflung.protocol.model_schema import values_of


def problem(text: str) -> str:
    with pytest.raises(UserError) as caught:
        Manifest.from_toml(text, "run.toml")
    return str(caught.value)


def test_template_spells_out_exactly_the_defaults() -> None:
    assert Manifest.from_toml(TEMPLATE, "run.toml") == Manifest() == Manifest.from_toml("", "run.toml")
    better = {"round": {"start_rounds": 40}, "inner": {"warmup_steps": 100, "schedule": "cosine"}}
    better["inner"]["optimizer"] = "muon"
    for every_key in (False, True):
        assert Manifest.from_toml(description(every_key), "run.toml") == Manifest.model_validate(better)
        begun = Manifest.from_toml(description(every_key, ("/a/model", "0" * 64)), "run.toml")
        assert begun.round.start_rounds == 0 and begun.inner.warmup_steps == 100
        assert begun.inner.optimizer == "adamw", "what AdamW has trained goes on with it"
    keys = set(re.findall(r"^(\w+) = ", SHORT, re.MULTILINE))
    assert keys <= set(re.findall(r"^(\w+) = ", TEMPLATE, re.MULTILINE)) and len(SHORT.splitlines()) <= 35
    for section, value in Manifest().model_dump().items():
        assert f"[{section}]" in TEMPLATE
        for key in value:
            assert re.search(rf"^{key} = .+?  # \S", TEMPLATE, re.MULTILINE), (
                f"{section}.{key} has no comment"
            )


def test_canonical_bytes_are_stable() -> None:
    manifest = Manifest.from_toml("[round]\nsync_every = 7\n[inner]\nlr = 1\n", "run.toml")
    assert manifest.canonical().startswith(
        b'{"checkpoint":{"every_rounds":0,"go_back_after_s":300.0,"keep":3},"data":{"batch":8,"column":"input_ids","dtype":"uint16","lease_samples":256,"length":0,"source":"python-stdlib","tokenizer":""},"eval":{"bytes_per_token":0.0,"every_rounds":"auto","source":"","windows":256},"inner"'
    )
    assert Manifest.from_canonical(manifest.canonical()) == manifest
    assert Manifest.from_canonical(manifest.canonical()).digest == manifest.digest
    # A whole number where a fraction is meant is the same manifest.
    assert Manifest.from_toml("[inner]\nlr = 1.0\n[round]\nsync_every = 7\n", "x").digest == manifest.digest


def test_a_run_names_one_place_of_its_data_or_several() -> None:
    for written in ('"s3://a-bucket/run 1"', '["https://a.example:8443/x-00.bin?v=2", "s3://bucket/*.npy"]'):
        text = f"[data]\nsource = {written.replace(' 1', '-1')}\nlength = 33\n"
        manifest = Manifest.from_toml(text, "run.toml")
        assert Manifest.from_canonical(manifest.canonical()) == manifest
        assert json.loads(manifest.canonical())["data"]["source"] == tomllib.loads(text)["data"]["source"]
        assert manifest.row_tokens == 33
    assert Manifest().row_tokens == Manifest().model.context + 1


def test_digest_names_the_content() -> None:
    assert len(Manifest().digest) == 32
    assert Manifest.from_toml("[run]\nseed = 1", "run.toml").digest != Manifest().digest
    # A change here makes every earlier run another run: it must be on purpose.
    assert Manifest().digest.hex().startswith("6d3855e4")


@pytest.mark.parametrize(
    ("pipeline", "codec", "gather"),
    [
        ("", "auto", "int8"),
        ("batch = 8", "fp32", "fp32"),
        ('batch = 8\nstages = 2\nmode = "local"', "auto", "int8"),
    ],
)
def test_codecs_that_nobody_chose_are_small_where_training_allows_it_and_exact_in_batches(
    pipeline: str, codec: str, gather: str
) -> None:
    rest = f'[merge]\npolicy = "mean"\n[pipeline]\n{pipeline}\n'
    for chosen in ("", '[round]\ncodec = "auto"\ngather_codec = "auto"\n'):
        manifest = Manifest.from_toml(chosen + rest, "run.toml")
        assert (manifest.round.codec, manifest.round.gather_codec) == (codec, gather)
        assert Manifest.from_canonical(manifest.canonical()) == manifest
    bf16 = Manifest.from_toml('[round]\ncodec = "bf16"\ngather_codec = "int4"\n' + rest, "run.toml")
    assert (bf16.round.codec, bf16.round.gather_codec) == ("bf16", "int4")


@pytest.mark.parametrize(
    ("rounds", "codec", "gather"),
    [("", "topk", "sparse"), ('codec = "int2"', "int2", "int8"), ("group = 4", "topk", "int8")],
)
def test_the_sparse_step_has_sparse_codecs_both_ways_where_they_can_be(
    rounds: str, codec: str, gather: str
) -> None:
    manifest = Manifest.from_toml(f'[outer]\nstep = "sparse"\n[round]\n{rounds}', "run.toml")
    assert (manifest.round.codec, manifest.round.gather_codec) == (codec, gather)
    assert Manifest.from_canonical(manifest.canonical()) == manifest


_SOURCE = (
    '[data] source: expected "python-stdlib", "", or token shards at https:// or s3://, one place or a list'
)
_STAGED = '[merge]\npolicy = "mean"\n[pipeline]\nbatch = 8\nstages = 2\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[round]\nsync_evry = 3", '[round] sync_evry: unknown key; did you mean "sync_every"?'),
        ('[round]\nsync_every = "fifty"', '[round] sync_every: expected an integer >= 1, found "fifty"'),
        ("[round]\nsync_every = true", "[round] sync_every: expected an integer >= 1, found true"),
        ("[round]\nsync_every = 0", "[round] sync_every: expected an integer >= 1, found 0"),
        ("[round]\nchunk_kb = 99999", "[round] chunk_kb: expected an integer >= 1 and <= 16384, found 99999"),
        (
            "[outer]\nmomentum = 1.0",
            '[outer] momentum: expected a number from 0 up to but not 1, or "auto", found 1.0',
        ),
        (
            '[outer]\nschedule = "streaming"',
            '[round] fragments: expected at least 2 with schedule = "streaming", found 1',
        ),
        (
            '[outer]\nstep = "sparse"\n[round]\ncodec = "int8"',
            '[outer] step: "sparse" expects [round] codec = "topk" or "int2", found codec = "int8"',
        ),
        (
            '[round]\ngather_codec = "topk"',
            '[round] gather_codec: expected "fp32" or "bf16" or "int8" or "int4" or "sparse" or "auto", found "topk"',
        ),
        (
            '[round]\ncodec = "topk"\ngather_codec = "sparse"',
            '[round] gather_codec: "sparse" expects [outer] step = "sparse" and codec = "topk", found step = '
            '"nesterov", codec = "topk"',
        ),
        (
            '[outer]\nstep = "sparse"\n[round]\ncodec = "int2"\ngather_codec = "sparse"',
            '[round] gather_codec: "sparse" expects [outer] step = "sparse" and codec = "topk", found step = '
            '"sparse", codec = "int2"',
        ),
        (
            '[outer]\nstep = "sparse"\n[round]\ngroup = 4\ngather_codec = "sparse"',
            '[round] group: expected 0 with gather_codec = "sparse", found 4: sums of groups are dense',
        ),
        ("[inner]\nlr = nan", "[inner] lr: expected a number > 0 and <= 10, found NaN"),
        ("[inner]\nbetas = [0.9]", "[inner] betas: expected two numbers from 0 up to but not 1, found [0.9]"),
        ('[model]\nkind = "gpt"', '[model] kind: expected "llama" or "hf" or "", found "gpt"'),
        ('[run]\nname = "A\\nb"', '[run] name: expected 1 to 64 of a-z, 0-9 and -, found "A\\nb"'),
        ("[run]\nsync_every = 3", "[run] sync_every: unknown key; it belongs in [round]"),
        ("sync_every = 3", "sync_every: unknown key; it belongs in [round]"),
        ("[rond]\nsync_every = 3", '[rond]: unknown section; did you mean "round"?'),
        ("round = 5", "[round]: expected a table, found 5"),
        (
            '[run]\n"a\\nb" = 1',
            '[run] "a\\nb": unknown key; known are name, seed, min_peers, max_peers, rounds',
        ),
        ("[run\n", "line 1, column 5: not valid TOML: Expected ']' at the end of a table declaration"),
        ('a = "', "line 1, column 6: not valid TOML: Unterminated string"),
        ("[run]\nmin_peers = 9\nmax_peers = 3", "[run] max_peers: expected at least min_peers (9), found 3"),
        (
            "[model]\nheads = 5",
            "[model] width: expected a multiple of heads (5), at most 1024 times it, found 64; or write head_dim",
        ),
        ('[data]\nsource = "/etc/passwd"', f'{_SOURCE}, found "/etc/passwd"'),
        ('[data]\nsource = "http://a.example/b.bin"', f'{_SOURCE}, found "http://a.example/b.bin"'),
        ('[data]\nsource = "https://a/b::file:///c"', f'{_SOURCE}, found "https://a/b::file:///c"'),
        ('[data]\nsource = "https://me:word@a/b"', f'{_SOURCE}, found "https://me:word@a/b"'),
        ("[data]\nsource = []", f"{_SOURCE}, found []"),
        ("[data]\nlength = 99", "[data] length: expected 0, or 2 to context + 1 (65), found 99"),
        ("[data]\nbatch = 300", "[data] lease_samples: expected at least one batch (300), found 256"),
        (
            "[net]\ndead_after_s = 2",
            "[net] dead_after_s: expected more than twice heartbeat_s (1.0), found 2.0",
        ),
        (
            f'{_STAGED}mode = "local"\n[outer]\nstep = "adamw"',
            '[outer] step: expected "nesterov" or "mean" with [pipeline] mode = "local", found "adamw"',
        ),
        (_STAGED, '[outer] step: expected "adamw" or "muon" with [pipeline] stages > 1, found "nesterov"'),
        (
            f'{_STAGED}mode = "local"\nlocal_micros = 9',
            "[pipeline] batch: expected at least local_micros (9), found 8",
        ),
        (
            "[pipeline]\nclip = 0.5",
            "[pipeline] clip: expected 0 with batch = 0, found 0.5: steps of each peer's own are clipped by "
            "[inner] clip",
        ),
        (
            f'{_STAGED}mode = "local"\nclip = 0.5\n[outer]\nstep = "mean"',
            '[pipeline] clip: expected 0 with mode = "local", found 0.5: steps of each peer\'s own are clipped by '
            "[inner] clip",
        ),
        (
            '[merge]\npolicy = "mean"\n[pipeline]\nbatch = 8\nmode = "local"',
            '[pipeline] mode: expected "sync" with stages = 1, found "local": a model in one piece takes steps of each '
            "peer's own with batch = 0",
        ),
    ],
)
def test_messages(text: str, expected: str) -> None:
    assert problem(text) == f"run.toml: {expected}"


def test_every_key_explains_a_wrong_type() -> None:
    for section, value in Manifest().model_dump().items():
        for key in value:
            message = problem(f"[{section}]\n{key} = 2001-01-01")
            assert re.fullmatch(rf'run\.toml: \[{section}\] {key}: expected .+, found "2001-01-01"', message)


@pytest.mark.parametrize("column", ["\x1b]0;x\x07", "a\nb", "\x9b31m", "\u202eab", "", "x" * 257])
def test_a_column_has_nothing_that_a_terminal_obeys(column: str) -> None:
    with pytest.raises(UserError, match="the name of a column") as told:
        Manifest.from_canonical(json.dumps({"data": {"column": column}}).encode())
    assert str(told.value).isprintable()
    assert Manifest.model_validate({"data": {"column": "jetons d'entrée, 入力"}})


SHARDS = '[data]\nsource = "https://a.example/train.bin"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[eval]\nwindows = 64", "[eval] windows: expected to be left out without source"),
        ('[eval]\nsource = "/etc/passwd"', '[eval] source: expected "", "python-stdlib", or token shards'),
        (
            '[eval]\nsource = "python-stdlib"\nwindows = 15',
            "[eval] windows: expected an integer >= 16 and <= 1024",
        ),
        (
            f'{SHARDS}[eval]\nsource = "python-stdlib"',
            '[eval] source: expected token shards, as [data] source has, found "python-stdlib"',
        ),
        (
            '[model]\nkind = ""\n[data]\nsource = ""\n[eval]\nsource = "python-stdlib"',
            '[eval] source: expected token shards, where [data] source is "", found "python-stdlib"',
        ),
        (
            f'{SHARDS}[eval]\nsource = "https://a.example/train.bin"',
            "[eval] source: expected other shards than [data] source, which the model learns from",
        ),
        (
            '[eval]\nsource = "python-stdlib"\nevery_rounds = 24\n[merge]\npolicy = "mean"\n'
            "[pipeline]\nbatch = 512\nmicro = 2",
            "[eval] every_rounds: expected at least 25 with windows = 256, found 24: it would take more than 1 %",
        ),
        (
            '[eval]\nsource = "python-stdlib"\nevery_rounds = 0',
            '[eval] every_rounds: expected an integer >= 1, or "auto"',
        ),
    ],
)
def test_what_is_held_out_is_other_text_in_the_same_tokens(text: str, told: str) -> None:
    assert told in problem(text)


def test_held_out_loss_takes_no_more_than_its_share() -> None:
    """A forward pass takes a third of a step, and each peer may have to compute all windows."""
    text = '[eval]\nsource = "python-stdlib"\nwindows = 256\n[round]\nsync_every = 50\n[data]\nbatch = 8\n'
    found = Manifest.from_toml(text, "run.toml")
    assert found.least_eval_rounds == found.eval_rounds == 22
    assert 22 * 50 * 8 * 0.01 >= 256 / 3 > 21 * 50 * 8 * 0.01
    told = "[eval] every_rounds: expected at least 22 with windows = 256, found 21: it would take more than 1 % of the"
    assert told in problem(text.replace("windows = 256", "windows = 256\nevery_rounds = 21"))
    assert Manifest.from_toml(text.replace("256", "256\nevery_rounds = 30"), "x").eval_rounds == 30
    assert "<= 1024, found 1025" in problem(text.replace("= 256", "= 1025"))


def test_a_start_has_periods_that_double() -> None:
    periods = Periods(50, 30)
    assert [periods.at(version) for version in (0, 9, 10, 19, 20, 29, 30, 99)] == [
        6,
        6,
        12,
        12,
        25,
        25,
        50,
        50,
    ]
    assert periods.before(30) == 10 * (6 + 12 + 25) and periods.before(100) == 430 + 70 * 50
    assert [Periods(4, 3).at(version) for version in range(4)] == [1, 1, 2, 4], "none is without a step"
    for steps, start in ((50, 30), (4, 7), (1, 2), (100, 1), (7, 0)):
        periods = Periods(steps, start)
        for version in range(40):
            assert periods.before(version + 1) - periods.before(version) == periods.at(version), (
                periods,
                version,
            )
    assert Periods(50).at(-1) == 50 and Periods(50, 30).at(-1) == 6
    assert Periods(50, HUGE).before(HUGE) > HUGE, "at once, however many there are"


def test_a_start_is_for_peers_that_take_steps_of_their_own() -> None:
    made = Manifest.from_toml("[round]\nstart_rounds = 30", "x")
    assert made.total_steps == made.periods.before(100) == 10 * (6 + 12 + 25) + 70 * 50
    assert made.outer_numbers.start == 30
    chosen = Manifest.from_toml("[round]\nstart_rounds = 30\n[outer]\nmomentum = 0.9", "x")
    assert chosen.outer_numbers.start == 0
    batch = '[pipeline]\nbatch = 4\n[merge]\npolicy = "mean"\n[round]\nstart_rounds = 3'
    assert "[round] start_rounds: expected 0 with [pipeline] batch > 0, found 3" in problem(batch)


def test_of_its_own_text_a_byte_is_a_token() -> None:
    assert Manifest.from_toml('[eval]\nsource = "python-stdlib"', "x").bytes_per_token == 1.0
    shards = f'{SHARDS}[eval]\nsource = "https://a.example/held_out.bin"\nbytes_per_token = 4.25'
    assert Manifest.from_toml(shards, "x").bytes_per_token == 4.25
    assert Manifest().bytes_per_token == 0.0


def test_at_most_five_lines() -> None:
    lines = problem("[run]\n" + "\n".join(f"key{i} = 1" for i in range(9))).splitlines()
    assert len(lines) == 5
    assert lines[-1] == "run.toml: and 5 more problems"


def test_a_model_of_your_own_needs_no_matching_heads() -> None:
    assert Manifest.from_toml('[model]\nkind = ""\nheads = 5', "run.toml").model.kind == ""


def test_a_byte_order_mark_is_harmless() -> None:
    assert Manifest.from_toml("\ufeff[run]\nseed = 1", "run.toml").run.seed == 1


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        "a = " + "9" * 5000,
        "[run]\nseed = 0x" + "f" * 9000,
        "[run]\nname = '" + "a" * 9000,
    ],
)
def test_absurd_text_is_a_user_error(text: str) -> None:
    assert all(len(line) < 300 for line in problem(text).splitlines())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 60_000,
        b" " * (MAX_MANIFEST_BYTES + 1),
        Manifest().canonical() + b" ",
        Manifest().canonical().replace(b"50", b'"fifty"'),
        Manifest().canonical().replace(b'"heads":4', b'"heads":5'),
        Manifest().canonical().replace(b'"seed":0', b'"seed":0,"seed":0'),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="^run manifest: .{1,300}$"):
        Manifest.from_canonical(data)


@given(st.one_of(st.text(), st.text("[]=\"'{}\n.,0123456789abefnrtu_-#")))
def test_random_text_raises_user_errors_only(text: str) -> None:
    try:
        Manifest.from_toml(text, "run.toml")
    except UserError as error:
        assert all(line.startswith("run.toml: ") for line in str(error).split("\n"))


@given(st.binary())
def test_random_bytes_raise_user_errors_only(data: bytes) -> None:
    with pytest.raises(UserError):
        Manifest.from_canonical(data)


def test_a_tokenizer_is_a_hash_with_or_without_a_place() -> None:
    digest = "0f" * 32
    for place in ("https://a.example/tokenizer.json", "s3://bucket/tokenizer.json"):
        data = Manifest.from_toml(
            f'[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{place}#{digest}"', "run.toml"
        ).data
        assert data.tokenizer_place == (place, digest)
    bare = f'[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{digest}"'
    assert Manifest.from_toml(bare, "run.toml").data.tokenizer_place == ("", digest)
    assert Manifest().data.tokenizer_place == ("", "")
    for wrong in (
        "https://a.example/tokenizer.json",
        f"file:///etc/passwd#{digest}",
        f"/etc/passwd#{digest}",
        f"https://a.example/*.json#{digest}",
        f"https://a.example/a#{digest}#{digest}",
        f"#{digest}",
        digest[:-1],
    ):
        with pytest.raises(
            UserError, match=r"\[data\] tokenizer: expected .* and its hash, or the hash alone"
        ):
            Manifest.from_toml(
                f'[data]\nsource = "https://a.example/x.bin"\ntokenizer = "{wrong}"', "run.toml"
            )


def test_the_codecs_of_a_manifest_are_those_that_exist() -> None:
    """The coordinator knows them by name only: it starts without torch."""
    of_results = set(get_args(ResultCodecName))
    assert {*CODECS, *of_results} == {*codec_names(), AUTO}
    assert set(CODECS) - of_results == {"topk", "int2"}, "results lose nothing"
    assert of_results - set(CODECS) == {"sparse"}
    with pytest.raises(UserError, match="codec"):
        Manifest.from_toml('[round]\ncodec = "fp33"\n', "run.toml")


IN_STAGES = '[outer]\nstep = "adamw"\n[merge]\npolicy = "mean"\n[model]\nkind = ""\n[pipeline]\nstages = 3\n'


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "batch = 40\nmin_per_stage = 30",
            "[run] max_peers: expected at least 90, for 3 stages with min_per_stage = 30, found 64",
        ),
        ("batch = 8\nmin_per_stage = 9", "[pipeline] batch: expected at least min_per_stage (9), found 8"),
        (
            "batch = 8\nmin_per_stage = 0",
            "[pipeline] min_per_stage: expected an integer >= 1 and <= 128, found 0",
        ),
        (
            "batch = 8\ncuts = [3, 2]",
            "[pipeline] cuts: expected 2 rising part numbers for 3 stages, found [3, 2]",
        ),
        ("batch = 8\ncuts = [3]", "[pipeline] cuts: expected 2 rising part numbers for 3 stages, found [3]"),
        (
            'batch = 8\ncodec = "int5"',
            '[pipeline] codec: expected "fp32" or "bf16" or "int8" or "int4", found "int5"',
        ),
        ("batch = 8\nbatch_size = 3", "[pipeline] batch_size: unknown key; did you mean"),
    ],
)
def test_what_no_run_in_stages_could_do_is_refused_before_anybody_joins(more: str, says: str) -> None:
    text = IN_STAGES + more
    with pytest.raises(UserError) as refused:
        Manifest.from_toml(text, "run.toml")
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"run.toml: {says}")


def test_more_stages_than_the_model_that_is_built_in_has_parts_are_refused() -> None:
    built_in = IN_STAGES.replace('kind = ""', "layers = 2").replace("stages = 3", "batch = 8\nstages = 5")
    with pytest.raises(
        UserError, match=r"stages: expected at most 4 for kind = .llama. with 2 layers, found 5"
    ):
        Manifest.from_toml(built_in, "run.toml")
    Manifest.from_toml(built_in.replace("stages = 5", "stages = 4"), "run.toml")


def test_cuts_of_a_model_in_one_stage_are_not_passed_over() -> None:
    with pytest.raises(UserError, match=r"cuts: a model in one stage has none, found \[2\]; set stages"):
        Manifest.from_toml(IN_STAGES.replace("stages = 3", "batch = 8\ncuts = [2]"), "run.toml")


@pytest.mark.parametrize(("preset", "chunk_kb"), [("tiny", 1024), ("350M", 1024), ("1B", 1050), ("7B", 6427)])
def test_chunks_that_nobody_chose_are_as_large_as_the_model_needs(preset: str, chunk_kb: int) -> None:
    manifest = Manifest.from_toml(f'[model]\npreset = "{preset}"', "run.toml")
    assert manifest.round.chunk_kb == chunk_kb
    assert 4 * values_of(manifest.model) <= chunk_kb * 1024 * CHUNKS_PER_FRAGMENT
    assert Manifest.from_canonical(manifest.canonical()) == manifest


def test_chunks_that_are_too_small_for_the_model_are_refused_where_the_run_is_hosted() -> None:
    told = problem('[model]\npreset = "7B"\n[round]\nchunk_kb = 1024')
    assert told == "run.toml: [round] chunk_kb: expected at least 6427 for this model, found 1024"


def test_sizes_that_are_not_written_follow_from_those_that_are() -> None:
    def sizes(text: str) -> tuple[int, ...]:
        model = Manifest.from_toml(f"[model]\n{text}", "run.toml").model
        return model.width, model.heads, model.kv_heads, model.head_dim, model.mlp_width

    assert sizes('preset = "1B"') == (2048, 32, 4, 64, 5632)
    assert sizes('preset = "1B"\nheads = 16') == (2048, 16, 4, 128, 5632)
    assert sizes('preset = "1B"\nheads = 2') == (2048, 2, 2, 1024, 5632)
    assert sizes('preset = "1B"\nwidth = 1024') == (1024, 32, 4, 32, 2752)
    assert sizes("width = 768\nheads = 12") == (768, 12, 12, 64, 2048)
    assert sizes("width = 770\nheads = 12\nhead_dim = 32\nmlp_width = 5\nqk_norm = true") == (
        770,
        12,
        12,
        32,
        5,
    )


def test_a_model_in_stages_has_a_head_of_its_own_unless_that_is_refused() -> None:
    staged = '[merge]\npolicy = "mean"\n[outer]\nstep = "adamw"\n[pipeline]\nbatch = 8\nstages = 2\n'
    assert Manifest.from_toml("", "run.toml").model.tied
    assert not Manifest.from_toml(staged, "run.toml").model.tied
    assert "[model] tied: expected false with [pipeline] stages > 1" in problem(
        f"[model]\ntied = true\n{staged}"
    )
    assert problem(f"model = 3\n{staged}").startswith("run.toml: [model]: expected a table, found 3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[model]\nwidth = 770\nheads = 12",
            "[model] width: expected a multiple of heads (12), at most 1024 times it",
        ),
        ("[model]\nhead_dim = 17", "[model] head_dim: expected an even number, found 17"),
        ("[model]\nkv_heads = 3", "[model] kv_heads: expected a divisor of heads (4), found 3"),
        ("[model]\nvocab = 100", "[model] vocab: expected at least 256 for bytes, found 100"),
        ("[model]\npreset = '8B'", '[model] preset: expected "tiny" or "15M"'),
        (
            "[model]\nvocab = 128256\n[data]\nsource = 'https://h.example/a.bin'",
            '[data] dtype: "uint16" holds 65536 tokens, [model] vocab is 128256: write the type that the shards have',
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_told_in_one_line(text: str, told: str) -> None:
    assert problem(text).startswith(f"run.toml: {told}") and problem(text).count("\n") == 0
