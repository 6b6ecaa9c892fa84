# SPDX-License-Identifier: Apache-2.0
"""tpu-inference loses the last tokens of a request that is not scheduled for a step.

Version: 0.32.0, `TPUModelRunner._modify_prev_results`, runner/tpu_runner.py:1560.

Under async scheduling the runner appends placeholders (zeros) for a step's tokens and
replaces them in the next step. It skips requests that are not in the batch by then, as
if they had finished. A request that merely was not scheduled, because the drafts of
others took the token budget, is still alive: when it returns, its last token is 0, and
everything after it is wrong.

Delete this file when `_modify_prev_results` also updates `self.requests` for requests
that are not in the batch (tests: "left unscheduled" in tests/serving).
"""

from __future__ import annotations

from typing import Any

from tpu_inference.runner import utils as runner_utils


def install(runner: Any) -> None:
    """Wraps `_modify_prev_results` of this runner."""
    modify_prev_results = runner._modify_prev_results

    def modify_all_prev_results() -> None:
        _replace_placeholders_of_unscheduled(runner)
        modify_prev_results()

    runner._modify_prev_results = modify_all_prev_results


def _replace_placeholders_of_unscheduled(runner: Any) -> None:
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
        num_placeholders = 1 + len(drafts.get(results.req_ids[index], ()))
        del state.output_token_ids[-num_placeholders:]
        state.output_token_ids.extend(sampled[index])
