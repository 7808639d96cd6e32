"""What may change while a run goes on: who may say so, what holds at which version, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import UserError
from farflung.protocol.limits import AMENDMENT_BYTES, AMENDMENTS_MOST
from farflung.protocol.manifest import Manifest
from farflung.protocol.run_terms import MAY_CHANGE, Terms, changes_of, encoded
from farflung.protocol.signing import Amendment, is_hosts
from rig.amended import FIRST, OTHER, PERIOD_10, PERIOD_20, PINNED, RUN_ID, amendment, signed, terms_of

# ---- which holds ---------------------------------------------------------------------------------------------------


def test_each_version_has_its_terms_and_those_before_stay_what_they_were() -> None:
    terms = terms_of((4, PERIOD_10), (9, {"outer": {"lr": 0.5}}))
    assert [terms.number_at(version) for version in (0, 3, 4, 8, 9, 99)] == [0, 0, 1, 1, 2, 2]
    assert [terms.at(version).round.sync_every for version in (0, 3, 4, 9)] == [50, 50, 10, 10]
    assert [terms.at(version).outer.lr for version in (8, 9)] == ["auto", 0.5]
    assert terms.first is FIRST and terms.newest == terms.at(9) and terms.first.digest == FIRST.digest


def test_the_newest_that_holds_holds_alone_after_a_run_went_back() -> None:
    """It reached version 20, amended from there on; then it went back to 5, and was amended there."""
    terms = terms_of((20, PERIOD_10))
    terms = terms.plus(amendment(terms, 5, era=1, **PERIOD_20))
    assert [terms.number_at(version) for version in (4, 5, 20, 30)] == [0, 2, 2, 2]
    assert [terms.number_at(version, era=0) for version in (5, 19, 20, 30)] == [0, 0, 1, 1], "as it was then"


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 90)), max_size=5),
    st.integers(0, 40),
    st.integers(0, 50),
)
def test_the_runs_own_step_is_the_sum_of_its_periods(
    changes: list[tuple[int, int]], version: int, start: int
) -> None:
    terms = Terms(Manifest.model_validate({"round": {"start_rounds": start}}))
    for at, period in changes:
        if period != terms.newest.round.sync_every:
            terms = terms.plus(amendment(terms, at, round={"sync_every": period}))
    by_hand = sum(terms.at(each).periods.at(each) for each in range(version))
    assert terms.steps_before(version) == by_hand
    assert terms.total_steps(version) == terms.steps_before(100)


# ---- who may say so ------------------------------------------------------------------------------------------------


def test_only_what_the_host_signed_for_this_run_is_believed() -> None:
    start = Terms(FIRST)
    good = amendment(start, 3, **PERIOD_10)
    assert is_hosts(good, RUN_ID, PINNED) and start.believed([good], RUN_ID, PINNED).count == 1
    forged = [
        signed(good, OTHER),
        msgspec.structs.replace(good, proof=b""),
        msgspec.structs.replace(good, version=2),
        msgspec.structs.replace(good, era=1),
        msgspec.structs.replace(good, changes=encoded(PERIOD_20)),
        signed(good, run_id=bytes([1]) * 16),
    ]
    for each in forged:
        with pytest.raises(UserError, match="amendment 1 is not signed by the host of this run"):
            start.believed([each], RUN_ID, PINNED)


def test_an_older_one_said_again_changes_nothing_and_none_can_be_left_out() -> None:
    start = Terms(FIRST)
    first = amendment(start, 3, **PERIOD_10)
    one = start.plus(first)
    second = amendment(one, 5, **PERIOD_20)
    two = one.believed([first, second], RUN_ID, PINNED)
    assert two.count == 2 and two.believed([first], RUN_ID, PINNED).amendments == two.amendments
    with pytest.raises(UserError, match="amendment 2 does not follow on the 0 that are known"):
        start.believed([second], RUN_ID, PINNED)
    other = amendment(start, 3, **PERIOD_20)  # the host has two first ones: its copy of the journal was older
    with pytest.raises(UserError, match="amendment 2 does not follow"):
        start.plus(other).believed([second], RUN_ID, PINNED)
    with pytest.raises(UserError, match="amendment 1 does not follow"):
        two.plus(first)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model": {"layers": 3}},
            r"\[model\] layers may not change while a run goes on: a run has one model",
        ),
        (
            {"round": {"chunk_kb": 3}},
            r"\[round\] chunk_kb may not change while a run goes on: the state is cut",
        ),
        ({"nothing": {"a": 1}}, r"\[nothing\] a may not change"),
        ({"round": {"sync_every": 0}}, "greater than or equal to 1"),
        ({"run": {"max_peers": 1, "min_peers": 2}}, "max_peers: expected at least min_peers"),
    ],
)
def test_a_host_that_signs_what_may_not_be_is_not_believed(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        terms_of((1, changes))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"round":[]}', b'{"round":3}', b"\xff"])
def test_no_bytes_do_harm(raw: bytes) -> None:
    with pytest.raises(UserError):
        Terms(FIRST).plus(Amendment(1, 0, 0, raw, FIRST.digest))


# ---- making one ----------------------------------------------------------------------------------------------------


def otherwise(section: str, key: str) -> Any:
    """Another value of this key, that is allowed beside the others' defaults."""
    usual = FIRST.model_dump()[section][key]
    words = {"codec": "int4", "upload_limit": "9 Mbit/s", "download_limit": "9 Mbit/s"}
    exact = {"lr": 0.01, "momentum": 0.5}
    return words.get(key, exact.get(key, usual + 1 if isinstance(usual, int | float) else usual))


def test_every_key_that_may_change_can_be_changed_and_no_other() -> None:
    content = FIRST.model_dump(mode="json")
    for section, keys in content.items():
        for key in keys:
            if section == "admission" or key == "relay":
                continue
            may = key in MAY_CHANGE.get(section, ())
            if may:
                wanted = json.loads(json.dumps(content))
                wanted[section][key] = otherwise(section, key)
                changes = changes_of(FIRST, Manifest.model_validate_json(json.dumps(wanted)))
                assert changes == {section: {key: wanted[section][key]}}
                assert terms_of((0, changes)).newest == Manifest.model_validate_json(json.dumps(wanted))
    assert all(key in content[section] for section, keys in MAY_CHANGE.items() for key in keys)


def test_what_may_not_change_says_why_in_one_line() -> None:
    wanted = Manifest.from_toml("[model]\nwidth = 128\n", "run.toml")
    with pytest.raises(UserError) as caught:
        changes_of(FIRST, wanted)
    assert str(caught.value).startswith(
        "[model] width may not change while a run goes on: a run has one model; put"
    )
    assert "\n" not in str(caught.value)


def test_it_is_bounded() -> None:
    with pytest.raises(UserError, match=f"at most {AMENDMENT_BYTES} are allowed"):
        encoded({"round": {"x" * AMENDMENT_BYTES: 1}})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([AMENDMENTS_MOST + 1, 0, 0, b"", bytes(32)], Amendment)


def test_the_coordinators_own_keys_are_changed_at_once_and_for_all_versions() -> None:
    own = Manifest.from_toml('[admission]\nmode = "token"\n', "run.toml")
    terms = terms_of((4, PERIOD_10)).with_own(own)
    assert {terms.at(version).admission.mode for version in (0, 4)} == {"token"} and terms.count == 1
    assert changes_of(FIRST, own) == {}
