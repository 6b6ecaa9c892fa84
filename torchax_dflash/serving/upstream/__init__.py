# SPDX-License-Identifier: Apache-2.0
"""Faults and gaps of tpu-inference and vLLM that are worked around, one file each.

    file                     in             without it
    unscheduled_requests.py  tpu-inference  a request that skips a step loses tokens
    preempted_requests.py    tpu-inference  a resumed request reads a discarded token
    draft_token_ids.py       tpu-inference  drafts are given to other requests
    grammar_bitmasks.py      tpu-inference  grammars do not constrain drafts
    logprobs.py              tpu-inference  log-probabilities are another row's
    aux_hidden_states.py     tpu-inference  no hidden states on the PyTorch path
    final_hidden_states.py   tpu-inference  the last layer's state is not normalised
    draft_model_config.py    vLLM           drafts that only we can run are refused
    request_validation.py    vLLM           requests are checked as another engine's

Each file names the version, file and line, and when it can be deleted. When moving
to another version of tpu-inference, go through this list; `plugin/versions.py` checks
at start-up that the functions are still there.
"""
