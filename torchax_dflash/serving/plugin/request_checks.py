# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: a setting that would be ignored is refused.

vLLM's logits processors do not run on TPUs. tpu-inference 0.32.0 supports temperature,
top-k, top-p, log-probabilities of the output and structured outputs
(`sampling_metadata.py`, `input_batch.py`), with or without drafts. With drafts, vLLM
itself refuses min-p and logit biases.
"""

from __future__ import annotations

from typing import Any

from torchax_dflash.core.config import config_error
from torchax_dflash.serving.plugin import options

_IGNORED = "tpu-inference ignores it, with or without DFlash. Leave it out."
_DEFAULTS = (
    "tpu-inference ignores it, with or without DFlash. Leave it out; where the model's "
    "generation_config.json sets it, start with --override-generation-config "
    "'{\"repetition_penalty\": 1.0}'."
)

_SUPPORTED: dict[str, tuple[Any, str]] = {
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
        "tpu-inference has no per-request seeds, with or without DFlash. Leave it out, "
        "or start with --seed.",
    ),
}
"""Field of `SamplingParams` -> the only supported value, and what to do instead."""


def check(vllm_config: Any, params: Any) -> None:
    """Checks a request, if its engine drafts with DFlash.

    Args:
        vllm_config: the engine's `VllmConfig`.
        params: the request's `SamplingParams`.

    Raises:
        ValueError: a setting that is not supported.
    """
    if not options.is_enabled(vllm_config):
        return
    is_greedy = params.sampling_type.name == "GREEDY"
    for name, (supported, remedy) in _SUPPORTED.items():
        value = getattr(params, name)
        if name == "seed" and is_greedy:
            continue  # nothing is drawn
        if value != supported and value not in ([], {}):
            raise config_error(name, f"{supported} with DFlash", value, remedy)
