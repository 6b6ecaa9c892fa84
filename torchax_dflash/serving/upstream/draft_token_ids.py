# SPDX-License-Identifier: Apache-2.0
"""tpu-inference pairs drafts with the requests of another step.

Version: 0.32.0, `SpeculativeDecodingManager.take_draft_token_ids`,
runner/speculative_decoding_manager.py:46.

The scheduler takes a step's drafts after the step. tpu-inference pairs them with the
batch as it is then, which under async scheduling is the next step's; and it returns
rows of a device array, where vLLM expects lists that it can shorten.

Delete this file when `take_draft_token_ids` remembers the requests it drafted for and
returns lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.outputs import DraftTokenIds


def install(runner: Any) -> None:
    """Wraps the two methods of this runner's `SpeculativeDecodingManager`."""
    manager = runner.speculative_decoding_manager
    propose = manager.propose_dflash_draft_token_ids
    drafted_for: list[str] = []

    def propose_dflash_draft_token_ids(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        drafted_for[:] = batch.req_ids[: batch.num_reqs]
        return propose(*args, **kwargs)

    def take_draft_token_ids() -> DraftTokenIds | None:
        drafts, manager._draft_token_ids = manager._draft_token_ids, None
        if drafts is None:
            return None
        rows = np.asarray(drafts)[: len(drafted_for)]
        return DraftTokenIds(list(drafted_for), rows.tolist())

    manager.propose_dflash_draft_token_ids = propose_dflash_draft_token_ids
    manager.take_draft_token_ids = take_draft_token_ids
