"""What both of two selections hold, counted some rows at a time."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.model.layers import count_common


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 600])
def test_keys_that_both_chose(rows: int) -> None:
    a, b = (torch.rand(rows, 33) < 0.4 for _ in range(2))
    assert count_common(a, b) == sum(x and y for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    assert count_common(a, a) == int(a.sum()) and count_common(a, ~a) == 0
