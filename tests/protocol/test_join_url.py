"""The join URL: what goes in comes out, and every mistake names its cure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl

KEY = bytes(range(32))
K = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
HOSTS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,40}", fullmatch=True),
    st.ip_addresses().map(str),
)
URLS = st.builds(
    JoinUrl,
    host=HOSTS,
    port=st.integers(1, 65535),
    run=st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True),
    key=st.binary(min_size=32, max_size=32),
    token=st.none() | st.from_regex(r"[A-Za-z0-9._~-]{1,80}", fullmatch=True),
)


def test_the_text() -> None:
    assert str(JoinUrl("gpu.example", 7000, "demo", KEY)) == f"farflung://gpu.example:7000/demo?k={K}"
    assert str(JoinUrl("::1", 7000, "demo", KEY, "tok")) == f"farflung://[::1]:7000/demo?k={K}&t=tok"
    assert JoinUrl.parse(f"  farflung://[::1]:7000/demo?t=tok&k={K}\n") == JoinUrl(
        "::1", 7000, "demo", KEY, "tok"
    )
    assert JoinUrl("fe80::1", 7000, "demo", KEY).address == "[fe80::1]:7000"


@given(URLS)
def test_round_trip(url: JoinUrl) -> None:
    assert JoinUrl.parse(str(url)) == url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:7000/demo", "does not start with farflung://"),
        ("", "does not start with farflung://"),
        (f"farflung://h/demo?k={K}", "no port"),
        (f"farflung://h:/demo?k={K}", "no port"),
        (f"farflung://h:0/demo?k={K}", "port 0 is out of range, expected 1 to 65535"),
        (f"farflung://h:70000/demo?k={K}", "port 70000 is out of range"),
        (f"farflung://h:x/demo?k={K}", "expected a number from 1 to 65535"),
        (f"farflung://h:\u0663/demo?k={K}", "expected a number from 1 to 65535"),
        (f"farflung://:7000/demo?k={K}", "no host"),
        (f"farflung://a b:7000/demo?k={K}", "not a host name"),
        (f"farflung://me@h:7000/demo?k={K}", "not a host name"),
        (f"farflung://::1:7000/demo?k={K}", r"\[brackets\]"),
        (f"farflung://[::zz]:7000/demo?k={K}", "not an IPv6 address"),
        (f"farflung://[fe80::1%eth0]:7000/demo?k={K}", "not an IPv6 address"),
        (f"farflung://[host]:7000/demo?k={K}", "only IPv6 hosts stand in brackets"),
        (f"farflung://h:7000?k={K}", "no run name"),
        (f"farflung://h:7000/De/mo?k={K}", "run name"),
        ("farflung://h:7000/demo", "no key .* quotes"),
        ("farflung://h:7000/demo?k=", "no key"),
        (f"farflung://h:7000/demo?k={K[:-1]}", "damaged key"),
        (f"farflung://h:7000/demo?k={K}A", "damaged key"),
        (f"farflung://h:7000/demo?k={K[:-1]}9", "damaged key"),
        (f"farflung://h:7000/demo?k={K[:-1]}!", "damaged key"),
        (f"farflung://h:7000/demo?k={K}=", "damaged key"),
        (f"farflung://h:7000/demo?k={K}&t=", "damaged token"),
        (f"farflung://h:7000/demo?k={K}&t=a b", "damaged token"),
        (f"farflung://h:7000/demo?k={K}&zz=1", 'unknown parameter "zz"'),
        (f"farflung://h:7000/demo?k={K}&k={K}", "k= is there twice"),
        (f"farflung://h:7000/demo?k={K}#x", "damaged key"),
        ("farflung://" + "a" * 9000, "at most 4096"),
    ],
)
def test_mistakes_name_their_cure(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        JoinUrl.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@given(st.text(), st.text(f"[]:/?&=kt.{K[:4]}%#\n", max_size=60))
def test_random_text_raises_user_errors_only(text: str, tail: str) -> None:
    for candidate in (text, f"farflung://{text}", f"farflung://{tail}", f"farflung://h:7000/demo?{text}"):
        try:
            JoinUrl.parse(candidate)
        except UserError:
            continue


def test_a_bad_url_cannot_be_built() -> None:
    for host, port, run, key, token in [
        ("", 1, "demo", KEY, None),
        ("h", 0, "demo", KEY, None),
        ("h", 1, "Demo", KEY, None),
        ("h", 1, "demo", KEY[:-1], None),
        ("h", 1, "demo", KEY, "a&b"),
    ]:
        with pytest.raises(UserError):
            JoinUrl(host, port, run, key, token)


def test_secrets_stay_out_of_messages() -> None:
    assert "tok" not in repr(JoinUrl("h", 7000, "demo", KEY, "tok"))
    for text in (f"farflong://h:7000/demo?k={K}&t=tok", f"farflung://h[:7000/demo?k={K}&t=tok"):
        with pytest.raises(UserError) as caught:
            JoinUrl.parse(text)
        assert "tok" not in str(caught.value)
        assert K not in str(caught.value)
