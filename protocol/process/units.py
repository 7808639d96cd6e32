"""Numbers and times as people read them: few characters, one unit.  Pure.

Called by whoever writes a line or draws a screen.
"""

from __future__ import annotations


def si(value: float, unit: str = "") -> str:
    """At most four characters and a letter, then the unit: 999, 1.2k, 12.3M, 123G."""
    for letter in ("", "k", "M", "G", "T", "P", "E"):
        digits = 0 if abs(value) >= 99.95 or (not letter and value == round(value, 6) // 1) else 1
        # Decided on the rounded number: 999.9 is 1.0k, not 1000.
        if abs(round(value, digits)) < 1000:
            return f"{value:.{digits}f}{letter}{unit}"
        value /= 1000
    return f"?{unit}"


def duration(seconds: float) -> str:
    if seconds < 119.5:
        return f"{seconds:.{int(seconds < 9.95)}f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{si(minutes / 60)} h" if minutes < 48 * 60 else f"{si(minutes / 1440)} days"
