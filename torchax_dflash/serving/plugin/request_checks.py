# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: nothing that would be left undone without a word.

On TPUs, vLLM's logits processors do not run. tpu-inference 0.32.0 knows temperature,
top-k, top-p, log-probabilities of the output and structured outputs
(`sampling_metadata.py`, `input_batch.py`), with or without drafts. With drafts, vLLM
itself refuses min-p and logit biases.
"""

from __future__ import annotations

from typing import Any

from torchax_dflash.core.config import config_error

_IGNORED = "tpu-inference ignores it, with or without DFlash. Leave it out."
_DEFAULTS = (
    "tpu-inference ignores it, with or without DFlash. Leave it out; where the model's "
    "generation_config.json sets it, start with --generation-config vllm."
)

_SERVED: dict[str, tuple[Any, str]] = {
    "repetition_penalty": (1, _DEFAULTS),
    "presence_penalty": (0, _IGNORED),
    "frequency_penalty": (0, _IGNORED),
    "min_tokens": (0, _IGNORED),
    "bad_words": (None, _IGNORED),
    "logprob_token_ids": (None, _IGNORED),
    "thinking_token_budget": (None, _IGNORED),
    "allowed_token_ids": (
        None,
        "tpu-inference fails on it, with or without DFlash. Leave it out.",
    ),
    "prompt_logprobs": (
        None,
        "tpu-inference cannot combine it with drafts. Leave it out, or serve without "
        "DFlash.",
    ),
    "seed": (
        None,
        "tpu-inference has no seeds of requests, with or without DFlash. Leave it out, "
        "or start with --seed.",
    ),
}
"""Field of vLLM's SamplingParams -> the only value that is served, what else to do."""


def check(params: Any) -> None:
    """Checks vLLM's SamplingParams of one request.

    Raises:
        ValueError: a field that is not served.
    """
    is_greedy = params.sampling_type.name == "GREEDY"
    for name, (served, remedy) in _SERVED.items():
        value = getattr(params, name)
        if name == "seed" and is_greedy:
            continue  # nothing is drawn
        if value != served and value not in ([], {}):
            raise config_error(name, f"{served} with DFlash", value, remedy)
