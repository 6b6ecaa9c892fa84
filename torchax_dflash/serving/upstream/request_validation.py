# SPDX-License-Identifier: Apache-2.0
"""vLLM has requests validated by the platform, which does not know their engine.

Version: 0.32.0, `InputProcessor.process_inputs`, v1/engine/input_processor.py:430.

`current_platform.validate_request(engine_input, params)` is called for the requests of
every engine of a process, on one platform object and without the engine's config. With
two engines in a process, one with DFlash and one without, the platform cannot tell
which engine a request is for. The input processor can: each engine has its own, which
knows its config. (Logits processors have a `validate_params` for each engine, but vLLM
loads none on TPUs: v1/sample/logits_processor/__init__.py:183.)

Delete this file when `validate_request` is given the `VllmConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any


@cache
def install(check: Callable[[Any, Any], None]) -> None:
    """Has every engine of this process check its requests first.

    Args:
        check: called with the engine's `VllmConfig` and a request's `SamplingParams`;
            raises ValueError to refuse the request, which becomes vLLM's own
            VLLMValidationError. Installed once.
    """
    # not above: the platform is chosen while vllm is still being imported
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(params, SamplingParams):
            try:
                check(self.vllm_config, params)
            except ValueError as error:
                # The server answers 400 and this message; with a ValueError, 500 and
                # none (v1/engine/async_llm.py:820).
                raise VLLMValidationError(str(error)) from error
        return original(self, request_id, prompt, params, *args, **kwargs)

    InputProcessor.process_inputs = process_inputs
