# SPDX-License-Identifier: Apache-2.0
"""tpu-inference reads a discarded token for a request that was preempted.

Version: 0.32.0, `TPUModelRunner._update_placeholder`, runner/tpu_runner.py:1635.

Under async scheduling the runner remembers which rows of a step have a token on the
device that the next step will read. With drafts it remembers all rows, including those
whose token is discarded because more of the request's known tokens are yet to be
computed. For a prompt this is checked later (`num_computed_tokens` against
`num_prompt_tokens`, :2635); for the outputs of a preempted request, which are computed
again, it is not: the runner reads a meaningless token, or fails an assertion.

Delete this file when `_update_placeholder` leaves discarded rows out with drafts, as it
does without.
"""

from __future__ import annotations

from typing import Any


def install(runner: Any) -> None:
    """Wraps `_update_placeholder` of this runner."""
    update_placeholder = runner._update_placeholder

    def update_kept_placeholders(discarded: list[int], *args: Any) -> Any:
        rows = update_placeholder(discarded, *args)
        for index in discarded:
            rows.pop(runner.input_batch.req_ids[index], None)
        return rows

    runner._update_placeholder = update_kept_placeholders
