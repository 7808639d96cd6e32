"""All runs here are of the simulator, in this process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # vectors of a dozen values: more threads only wait for each other
