# SPDX-License-Identifier: Apache-2.0
"""vLLM refuses drafts that its own proposer cannot run.

Version: 0.32.0, `VllmConfig._get_v1_model_runner_unsupported_features`,
config/vllm.py:2997.

After the platform has checked the config, vLLM refuses DFlash-2 drafts and drafts with
both sliding-window and full attention, because its V1 model runner, whose rules
apply on TPUs, cannot run them. Ours reads the draft from its folder and keeps its
K/V itself, so none of this applies.

Delete this file when vLLM leaves the decision to the platform.
"""

from __future__ import annotations

import copy
from typing import Any


def show_as_plain_dflash(speculative_config: Any) -> None:
    """Gives it a copy of the draft's config that vLLM accepts."""
    model = copy.copy(speculative_config.draft_model_config)
    speculative_config.draft_model_config = model
    hf_config = model.hf_config = copy.copy(model.hf_config)
    hf_config.architectures = ["DFlashDraftModel"]
    hf_config.layer_types = ["full_attention"] * hf_config.num_hidden_layers
    model.model_arch_config = copy.copy(model.model_arch_config)
    model.model_arch_config.architectures = hf_config.architectures
