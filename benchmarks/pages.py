"""Puts what a script measured into a page, between its two markers."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, mark: str, text: str) -> None:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    old = page.read_text(encoding="utf-8")
    before, found, rest = old.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page}: the markers of {mark} are missing")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
