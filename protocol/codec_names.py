"""The names of the codecs, their order from fine to coarse, and what a value costs on the wire.  Pure.

Read by the coordinator (which has no torch, and so not the codecs themselves), by configuration and by the
tests of the codecs.  Must not know how any of them works.
"""

from __future__ import annotations

AUTO = "auto"
LADDER = ("int8", "int4", "int2", "topk")  # fine to coarse
# On the wire; a test holds it to the codecs themselves, which the coordinator can't import (it has no torch).
BITS_PER_VALUE = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0625, "int4": 4.25, "int2": 2.25, "topk": 0.2227}
