"""What a `run.toml` may say, and hardly anybody means: a line each, for the host.  Pure.

Called by `farflung coordinate`.  What can't be is refused in manifest.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from farflung.protocol.manifest import Manifest

VALUES_PER_KB = 256  # of fp32


def doubts(m: Manifest) -> list[str]:
    return [*_of_rounds(m), *_of_steps(m), *_of_the_model(m)]


def _of_rounds(m: Manifest) -> Iterator[str]:
    rules, outer = m.round, m.outer
    if rules.codec in ("topk", "int2") and outer.step == "nesterov":
        yield (
            f'[outer] step: codec = "{rules.codec}" leaves most of what is learned to later rounds, where "nesterov" '
            'adds its momentum once more; "sparse" is made for it'
        )
    if outer.overlap_steps and outer.schedule == "blocking":
        yield '[outer] overlap_steps: schedule = "blocking" has none; write "overlap" or "streaming", or leave it out'
    elif outer.overlap_steps > rules.sync_every and not rules.period_s:
        yield (
            f"[outer] overlap_steps: {outer.overlap_steps} are more than the sync_every ({rules.sync_every}) after "
            "which the next round is due: each result comes a round late"
        )
    if rules.period_s and "sync_every" in rules.model_fields_set:
        yield (
            f"[round] period_s: a round is due every {rules.period_s:g} s; sync_every ({rules.sync_every}) only says "
            "how many steps a version counts for rates that go down"
        )
    if rules.deadline_s > rules.round_timeout_s:
        yield (
            f"[round] deadline_s: rounds wait {rules.deadline_s:g} s for the last peer, longer than a whole round may "
            f"take (round_timeout_s, {rules.round_timeout_s:g})"
        )


def _of_steps(m: Manifest) -> Iterator[str]:
    inner = m.inner
    steps_itself = not m.pipeline.batch or m.pipeline.mode == "local"
    if steps_itself and inner.schedule == "constant" and inner.warmup_steps >= m.total_steps:
        yield (
            f"[inner] warmup_steps: {inner.warmup_steps} are no less than the {m.total_steps} steps of the run (rounds "
            "* sync_every): the rate never reaches lr"
        )


def _of_the_model(m: Manifest) -> Iterator[str]:
    model, rules = m.model, m.round
    if not model.builtin:
        if m.data.source == "python-stdlib" and "source" in m.data.model_fields_set:
            yield (
                '[data] source: "python-stdlib" is the built-in model\'s text; with builtin = "" each peer\'s script '
                'reads data of its own: write source = ""'
            )
        return
    # At most: norms and biases are in it.
    width = model.width
    values = (256 + model.context) * width + model.layers * 13 * width * (width + 1) + 2 * width
    chunks = -(-values // (rules.chunk_kb * VALUES_PER_KB))
    if rules.fragments > chunks and not m.pipeline.batch:
        yield (
            f"[round] fragments: {rules.fragments}, and the built-in model has {chunks} chunks of chunk_kb = "
            f"{rules.chunk_kb} at most: no peer could take part; make chunk_kb or fragments smaller"
        )
