# SPDX-License-Identifier: Apache-2.0
"""Two mends of tpu-inference 0.32.0 without which outputs can be wrong.

Under async scheduling the runner keeps placeholders (zeros) for a step's tokens until
the next step replaces them, and remembers which rows' tokens to take from the device.

1. `TPUModelRunner._modify_prev_results` (`tpu_runner.py:1497`) skips requests that are
   not in the batch by then, as if they had finished. A request that just was not
   scheduled, because drafts of others took the token budget, stays alive; when it
   returns, its last token reads as 0, and everything after it is wrong.
2. `_update_placeholder` (`tpu_runner.py:1635`) remembers rows, too, whose token is
   discarded because more of their tokens are yet to be computed. For a prompt that is
   checked later; for the outputs of a preempted request, which are computed anew, it is
   not: the runner takes a token that means nothing, or fails an assertion.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from tpu_inference.runner import utils as runner_utils


def mend(runner: Any) -> None:
    """Replaces both methods of this runner."""
    modify_prev_results = runner._modify_prev_results
    update_placeholder = runner._update_placeholder

    def filling_in(self: Any) -> None:
        _fill_in_unscheduled(self)
        modify_prev_results()

    def forgetting_discarded(self: Any, discarded: list[int], *args: Any) -> Any:
        rows = update_placeholder(discarded, *args)
        for index in discarded:
            rows.pop(self.input_batch.req_ids[index], None)
        return rows

    runner._modify_prev_results = MethodType(filling_in, runner)
    runner._update_placeholder = MethodType(forgetting_discarded, runner)


def _fill_in_unscheduled(runner: Any) -> None:
    results = runner._pre_async_results
    batched = runner.input_batch.req_id_to_index
    unscheduled = [
        (index, state)
        for index, state, _ in results.request_seq_lens
        if (req_id := results.req_ids[index]) not in batched
        and runner.requests.get(req_id) is state
    ]
    if not unscheduled:
        return
    sampled = runner_utils.host_extract_sampled_tokens(
        runner,
        results.spec_decode_metadata,
        results.next_tokens,
        results.logits_indices_selector,
        results.discard_sampled_tokens_req_indices,
        len(results.req_ids),
    )
    drafts = results.scheduler_output.scheduled_spec_decode_tokens
    for index, state in unscheduled:
        if not sampled[index]:
            continue
        placeholders = 1 + len(drafts.get(results.req_ids[index], ()))
        del state.output_token_ids[-placeholders:]
        state.output_token_ids.extend(sampled[index])
