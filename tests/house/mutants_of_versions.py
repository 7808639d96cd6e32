"""Rules of two versions of the protocol that are spoken side by side: see mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

TABLES = ("tests/protocol/test_versions.py",)
MIXED = ("tests/whole/test_versions.py",)

VERSIONS: tuple[Mutant, ...] = (
    Mutant(
        "news are left out of what is said to whom speaks the last version",
        "protocol/envelope.py",
        "return part if version >= limits.PROTOCOL_VERSION else _without_news(part)",
        "return part",
        TABLES,
    ),
    Mutant(
        "what has no news in it keeps its bytes",
        "protocol/envelope.py",
        "if values is kept and not new:",
        "if False:",
        ("tests/protocol/test_messages.py", *TABLES),
    ),
    Mutant(
        "a kind that somebody does not know is not said to it",
        "protocol/envelope.py",
        "if version < limits.PROTOCOL_VERSION and kind in NEW_KINDS:",
        "if False:",
        TABLES,
    ),
    Mutant(
        "two versions apart is too far",
        "protocol/envelope.py",
        "return shared if shared >= max(newest - 1, limits.LAST_PROTOCOL) else 0",
        "return shared",
        TABLES,
    ),
    Mutant(
        "a hello is taken in the version of its challenge alone",
        "coordinator/door/hello_check.py",
        "if hello.protocol != version:",
        "if hello.protocol > version:",
        TABLES,
    ),
    Mutant(
        "rules that the last version does not know shut it out",
        "coordinator/door/hello_check.py",
        "if version < self._facts.oldest:",
        "if not version:",
        TABLES,
    ),
    Mutant(
        "a member is told what it knows",
        "coordinator/run/core.py",
        "self._effects.append(Tell(member.peer, member.session, message, member.protocol))",
        "self._effects.append(Tell(member.peer, member.session, message, 1 << 30))",
        ("tests/coordinator/run/test_core.py",),
    ),
    Mutant(
        "who knocks is answered in the version that it knows",
        "coordinator/run/machine.py",
        "self.core.do(AnswerDoor(caller, told, both_speak(message.protocol)))",
        "self.core.do(AnswerDoor(caller, told, 1 << 30))",
        MIXED,
    ),
    Mutant(
        "a host of the last version hears the last version",
        "peer/machine/getting_in.py",
        'if refuse.code == "protocol" and self._knocked > LAST_PROTOCOL:',
        "if False:",
        TABLES,
    ),
    Mutant(
        "the newest version is tried again",
        "peer/machine/getting_in.py",
        "self._knocked, self._falls_back = protocol, False",
        "self._knocked = protocol",
        TABLES,
    ),
    Mutant(
        "a key of the rules that came later is not in their bytes at its default",
        "protocol/manifest.py",
        "for section, key in NEW_KEYS.keys() - self._new_keys:",
        "for section, key in ():",
        TABLES,
    ),
)
