"""Where a coordinator is: join URLs, whose mistakes name their cure, and signed lists of which none can be made up."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address, JoinUrl, Whereabouts, whereabouts_of
from farflung.protocol.limits import ADDRESSES_MOST, WHEREABOUTS_BYTES
from farflung.protocol.signing import curve_key_of

KEY = bytes(range(32))
K = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
HOSTS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,40}", fullmatch=True),
    st.ip_addresses().map(str),
)
ADDRESSES = st.builds(Address, HOSTS, st.integers(1, 65535))
URLS = st.builds(
    JoinUrl.at,
    addresses=st.lists(ADDRESSES, min_size=1, max_size=ADDRESSES_MOST, unique=True).map(tuple),
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
        (f"farflung://a:1,b:2,c:3,d:4,e:5/demo?k={K}", "of HOST:PORT at most 4"),
        (f"farflung://a:1,,b:2/demo?k={K}", "no port after the host"),
        (f"farflung://a:1,b/demo?k={K}", "no port after the host"),
        (f"farflung://a:1,b:2,a:1/demo?k={K}", "an address is there twice"),
        (f"farflung://a:1,::1:2/demo?k={K}", r"\[brackets\]"),
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


def test_several_addresses() -> None:
    url = JoinUrl.parse(f"farflung://a.example:29800,[2001:db8::1]:29800,10.0.0.7:1/demo?k={K}&t=tok")
    assert url.addresses == (("a.example", 29800), ("2001:db8::1", 29800), ("10.0.0.7", 1))
    assert (url.host, url.port, url.address) == ("a.example", 29800, "a.example:29800")
    assert str(url) == f"farflung://a.example:29800,[2001:db8::1]:29800,10.0.0.7:1/demo?k={K}&t=tok"
    with pytest.raises(UserError, match="at most 4"):
        JoinUrl("h", 1, "demo", KEY, None, tuple(Address("h", port) for port in range(2, 6)))


# ---- signed lists -----------------------------------------------------------------------------------------------

SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
PINNED = curve_key_of(SECRET.public_key().public_bytes_raw())


def proof_by(secret: Ed25519PrivateKey, statement: bytes) -> bytes:
    return secret.public_key().public_bytes_raw() + secret.sign(statement)


def told(secret: Ed25519PrivateKey = SECRET, **changes: object) -> Whereabouts:
    said = Whereabouts("demo", 3, 7, ("a.example:29800", "[2001:db8::1]:1"), 0, b"")
    return msgspec.structs.replace(said, **changes).signed(lambda statement: proof_by(secret, statement))


def test_a_signed_list_leads_to_the_same_coordinator_as_its_url() -> None:
    said = whereabouts_of(told().raw, PINNED, "demo")
    assert said == told()
    assert str(said.url("tok")) == str(JoinUrl.at(said.places, "demo", PINNED, "tok"))
    assert said.order > told(number=6).order and told(incarnation=4, number=0).order > said.order
    assert whereabouts_of(told().raw, b"") == said, "without a key it is whoever it says"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        told(OTHER).raw,
        told(addresses=("a:0",)).raw,
        told(addresses=("a:1", "a:1")).raw,
        told(addresses=("tcp://a:1",)).raw,
        told(run="other").raw,
        told().raw + b"\0",
        told(addresses=("a" * 200 + ":1",) * 1 + tuple("b" * 240 + f":{port}" for port in (1, 2, 3))).raw,
        msgspec.structs.replace(told(), proof=b"").raw,
        msgspec.structs.replace(told(), incarnation=4).raw,
        msgspec.structs.replace(told(), number=8).raw,
        msgspec.structs.replace(told(), expires_s=9).raw,
        msgspec.structs.replace(told(), addresses=("evil.example:1",)).raw,
    ],
)
def test_a_list_that_the_run_did_not_sign_is_none(raw: bytes) -> None:
    assert whereabouts_of(raw, PINNED, "demo") is None


@given(st.data())
def test_no_byte_of_a_list_can_be_another(data: st.DataObject) -> None:
    raw = bytearray(told().raw)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whereabouts_of(bytes(raw), PINNED, "demo") is None


@given(st.binary(max_size=2 * WHEREABOUTS_BYTES))
def test_no_bytes_raise(raw: bytes) -> None:
    assert whereabouts_of(raw, PINNED) is None
