"""Of sparse results: what they leave out goes back, once, to whoever sent it."""

from __future__ import annotations

from mutant import Mutant

FEEDBACK, STATE, MANIFEST = "compression/codec.py", "peer/state/outer_state.py", "protocol/manifest.py"
OF_FEEDBACK = ("tests/compression/test_feedback.py",)
KEPT, OF_KEPT = "peer/trainer/kept_optimizer.py", ("tests/peer/trainer/test_kept_optimizer.py",)
OF_UNSENT = ("tests/peer/state/test_unsent.py",)
OF_STATE, OF_MANIFEST = ("tests/peer/state/test_sparse_results.py",), ("tests/protocol/test_manifest.py",)
PLAIN, OF_CODECS = "compression/plain_codecs.py", ("tests/compression/test_codecs.py",)

SPARSE = (
    Mutant(
        "what a result has is not refunded", FEEDBACK, "sent_n.mul_(result_n == 0)", "sent_n", OF_FEEDBACK
    ),
    Mutant(
        "what was not sent belongs to a state",
        "peer/state/unsent.py",
        "left.era == era and version >= left.version",
        "version >= left.version",
        OF_UNSENT,
    ),
    Mutant(
        "what was not sent is taken up once",
        "peer/state/unsent.py",
        "        left = self.left.pop(fragment, None)",
        "        left = self.left.get(fragment)",
        OF_UNSENT,
    ),
    Mutant(
        "what was not sent grows old",
        FEEDBACK,
        "return float(_SHARE_OF_MISSED**missed) if missed <= _MISSED_MOST else 0.0",
        "return 1.0 if missed <= _MISSED_MOST else 0.0",
        OF_UNSENT,
    ),
    Mutant(
        "an optimizer takes up what is of its own kind and shapes",
        KEPT,
        "if self.about != _about(optimizer) or not all(bool(each.isfinite().all()) for each in floats):",
        "if not all(bool(each.isfinite().all()) for each in floats):",
        OF_KEPT,
    ),
    Mutant(
        "what an optimizer takes up is a copy",
        KEPT,
        'value = value.to(parameter.device if where == "here" else "cpu", copy=True)',
        'value = value.to(parameter.device if where == "here" else "cpu")',
        OF_KEPT,
    ),
    Mutant(
        "an optimizer that goes on has no small steps",
        "peer/trainer/api.py",
        "            elif not loop.kept_optimizer.read_into(optimizer):",
        "            else:",
        ("tests/whole/test_laboratory.py",),
    ),
    Mutant(
        "nothing is refunded twice",
        FEEDBACK,
        "(owed := self._owed.pop(start, None)) is None",
        "(owed := self._owed.get(start)) is None",
        OF_FEEDBACK,
    ),
    Mutant(
        "a new round ends what is owed",
        FEEDBACK,
        "self._owed.clear()  # of results",
        "pass  # of results",
        OF_FEEDBACK,
    ),
    Mutant(
        "only sparse results leave something out",
        STATE,
        "feedback.settle(owed=self._gather.name == SPARSE)",
        "feedback.settle(owed=True)",
        OF_STATE,
    ),
    Mutant("a result refunds", STATE, "feedback.refund(start, delta_n)", "pass", OF_STATE),
    Mutant("what is installed refunds nothing", STATE, "feedback.forget(start)", "pass", OF_STATE),
    Mutant(
        "a chunk lies in its fragment",
        STATE,
        "(chunk - fragment.first) * self._model.chunk_elements",
        "chunk * self._model.chunk_elements",
        OF_STATE,
    ),
    Mutant(
        "sparse results want sparse contributions",
        MANIFEST,
        '(step != "sparse" or codec != "topk")',
        'step != "sparse"',
        OF_MANIFEST,
    ),
    Mutant(
        "sums of groups are dense",
        MANIFEST,
        'due.get("codec", rules.codec) == "topk" and not rules.group',
        'due.get("codec", rules.codec) == "topk"',
        OF_MANIFEST,
    ),
    Mutant(
        "places ascend",
        PLAIN,
        "or (np.diff(places_rk, axis=1) < 0).any()",
        "",
        OF_CODECS,
    ),
    Mutant(
        "places lie within their row",
        PLAIN,
        "(places_rk[:, -1] >= _ROW).any() or ",
        "",
        OF_CODECS,
    ),
    Mutant(
        "a row has so many places",
        PLAIN,
        "if (np.count_nonzero(high_rn, axis=1) != count).any():",
        "if (np.count_nonzero(high_rn, axis=1) < count).any():",
        OF_CODECS,
    ),
)
