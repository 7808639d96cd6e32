"""Messages of the BitTorrent DHT: what goes in comes out, and no bytes of a stranger's do more than be none."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.console.phonebook import bencode
from farflung.console.phonebook.bencode import (
    NoBencode,
    Value,
    answer_in,
    decoded,
    encoded,
    question,
    to_sign,
)

VALUES: st.SearchStrategy[Value] = st.recursive(
    st.integers(-(2**62), 2**62) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.binary(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_the_bytes_are_those_of_the_standard() -> None:
    said: Value = {b"t": b"aa", b"y": b"q", b"n": [1, -2, b""], b"a": {b"id": b"x"}}
    assert encoded(said) == b"d1:ad2:id1:xe1:nli1ei-2e0:e1:t2:aa1:y1:qe"
    assert to_sign(7, b"hello") == b"4:salt8:farflung3:seqi7e1:v5:hello"
    assert bencode.target_of(bytes(32)) == hashlib.sha1(bytes(32) + b"farflung").digest()
    asked = decoded(question(b"tag4", bytes(20), b"get", {b"target": bytes(20)}))
    assert isinstance(asked, dict) and asked[b"q"] == b"get" and asked[b"ro"] == 1


@given(VALUES)
def test_round_trip(value: Value) -> None:
    assert decoded(encoded(value)) == value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"i",
        b"ie",
        b"i1",
        b"i1x",
        b"5:abc",
        b"-1:",
        b"l",
        b"d1:a",
        b"di1ei2ee",
        b"d1:ae",
        b"1:aa",
        b"l" * 50,
    ],
)
def test_what_is_no_bencode(raw: bytes) -> None:
    with pytest.raises(NoBencode):
        decoded(raw)


@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_raise(raw: bytes) -> None:
    answer_in(raw)


@given(VALUES, VALUES, VALUES, VALUES)
def test_nor_does_an_answer_of_other_types(number: Value, nodes: Value, token: Value, record: Value) -> None:
    body: Value = {b"id": number, b"nodes": nodes, b"token": token, b"v": record}
    said = answer_in(encoded({b"t": b"tag4", b"y": b"r", b"r": body}))
    if said is not None:
        assert said[1] is not None and isinstance(said[1].record, bytes) and len(said[1].number) == 20


def test_an_answer() -> None:
    node = bytes(range(20)) + bytes([10, 0, 0, 7]) + (6881).to_bytes(2, "big")
    nowhere = bytes(20) + bytes([10, 0, 0, 8]) + bytes(2)
    body: Value = {b"id": bytes(20), b"nodes": node + nowhere + b"cut", b"token": b"t", b"v": b"record"}
    assert answer_in(encoded({b"t": b"tag4", b"y": b"r", b"r": body})) == (
        b"tag4",
        bencode.Answer(bytes(20), (bencode.Node(bytes(range(20)), ("10.0.0.7", 6881)),), b"t", b"record"),
    )
    many: Value = {b"id": bytes(20), b"nodes": node * 100}
    said = answer_in(encoded({b"t": b"tag4", b"y": b"r", b"r": many}))
    assert said is not None and said[1] is not None and len(said[1].nodes) == bencode.NODES_MOST
    assert answer_in(encoded({b"t": b"tag4", b"y": b"e", b"e": [301, b"no"]})) == (b"tag4", None)
