# SPDX-License-Identifier: Apache-2.0
"""The aux hidden state of a target's last layer is not what drafts are trained on.

Version: vLLM and tpu-inference 0.32.0;
`SpeculativeDecodingManager.propose_dflash_draft_token_ids`,
runner/speculative_decoding_manager.py:139.

A DFlash draft reads Hugging Face's `hidden_states`, whose last entry is normalised. The
aux hidden state of the last layer is not; the target's output is. tpu-inference hands
the output to this method and not on to the proposer.

Delete this file when the manager hands `hidden_states` to `prepare_inputs`.
"""

from __future__ import annotations

from typing import Any


def install(runner: Any) -> None:
    """Hands the target's output to the proposer, before each call of it."""
    manager = runner.speculative_decoding_manager
    propose = manager.propose_dflash_draft_token_ids

    def propose_dflash_draft_token_ids(*args: Any, **kwargs: Any) -> Any:
        hidden_states = kwargs["hidden_states"] if kwargs else args[-1]
        runner.drafter.final_hidden_states = hidden_states
        return propose(*args, **kwargs)

    manager.propose_dflash_draft_token_ids = propose_dflash_draft_token_ids
