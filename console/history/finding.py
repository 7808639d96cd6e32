"""What the audit found of one promise: how much was looked at, and what broke it.

Filled by the checks in audit.py.  Data and its words, no judgement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHOWN = 5


@dataclass
class Finding:
    promise: str
    title: str
    of_what: str  # what `checked` counts
    checked: int = 0
    broken: list[str] = field(default_factory=list)
    more: str = ""

    def expect(self, holds: bool, told: str) -> None:
        self.checked += 1
        if not holds:
            self.broken.append(told)

    def lines(self) -> list[str]:
        """One line; a broken promise has more."""
        verdict = "BROKEN" if self.broken else "kept" if self.checked else "not seen"
        more = f" ({self.more})" if self.more else ""
        line = f"{self.promise:<4}{verdict:<9}{self.title}: {self.checked} {self.of_what} checked{more}"
        hidden = len(self.broken) - SHOWN
        told = [f"    {text}" for text in self.broken[:SHOWN]]
        return [line, *told, *([f"    and {hidden} more"] if hidden > 0 else [])]
