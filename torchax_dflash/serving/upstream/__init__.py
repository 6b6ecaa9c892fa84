# SPDX-License-Identifier: Apache-2.0
"""Faults and gaps of tpu-inference and vLLM that are worked around, one file each.

    file                     in            without it
    unscheduled_requests.py  tpu-inference a request that skips a step loses tokens
    preempted_requests.py    tpu-inference a resumed request reads a discarded token
    draft_token_ids.py       tpu-inference drafts reach the scheduler under wrong names
    grammar_bitmasks.py      tpu-inference one grammar bitmask a request, not a draft
    logprobs.py              tpu-inference log-probabilities of another row
    aux_hidden_states.py     tpu-inference no hidden states for DFlash (PyTorch path)
    final_hidden_states.py   tpu-inference the last layer's state is not normalised
    draft_model_config.py    vLLM          refuses drafts that only we can run
    request_validation.py    vLLM          requests are checked once a process, not
                                           once an engine

Each file says which version, file and line is meant and when it can be deleted. When
moving to another version of tpu-inference, go through this list; `plugin/versions.py`
checks at start-up that the functions are still there.
"""
