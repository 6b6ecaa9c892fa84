# SPDX-License-Identifier: Apache-2.0
"""Whose the rows of tpu-inference's flat layout are."""

import numpy as np
import pytest

from torchax_dflash.serving.flat_rows import flat_rows


@pytest.mark.parametrize("garbage", [0, 7, -3, 2**31 - 1])
def test_rows_of_requests_with_and_without_rows(garbage):
    query_start_loc = np.array([0, 3, 3, 5, garbage, garbage], np.int32)
    rows = flat_rows(query_start_loc, 3, rows=8)
    assert rows.exists.tolist() == [True] * 5 + [False] * 3
    assert rows.request[:5].tolist() == [0, 0, 0, 2, 2]
    assert rows.place[:5].tolist() == [0, 1, 2, 0, 1]
    assert 0 <= rows.request.min() <= rows.request.max() < 5


def test_no_request():
    rows = flat_rows(np.zeros(3, np.int32), 0, rows=4)
    assert not rows.exists.any()
