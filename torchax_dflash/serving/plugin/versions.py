# SPDX-License-Identifier: Apache-2.0
"""Which versions of tpu-inference this plugin works with, checked at start-up.

The plugin overrides functions that are not public, so another version may lack them.
That is reported at start-up rather than in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from importlib import metadata
from typing import Any

logger = logging.getLogger(__name__)

TESTED = {"tpu-inference": "0.32.0"}


@dataclass(frozen=True)
class Seam:
    """A function of another package that we call, replace or are called through.

    Attributes:
        module: where it is defined.
        name: its qualified name there.
        parameters: names of its leading parameters; others may follow.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_RUNNER = "tpu_inference.runner.tpu_runner"
SEAMS = (
    Seam(_RUNNER, "TPUModelRunner._modify_prev_results", ("self",)),
    Seam(_RUNNER, "TPUModelRunner._update_placeholder", ("self",)),
    Seam(
        "tpu_inference.runner.speculative_decoding_manager",
        "SpeculativeDecodingManager.propose_dflash_draft_token_ids",
        ("self", "spec_decode_metadata", "last_sampled_token_id"),
    ),
    Seam(
        "tpu_inference.runner.speculative_decoding_manager",
        "SpeculativeDecodingManager.take_draft_token_ids",
        ("self",),
    ),
    Seam(_RUNNER, "TPUModelRunner._prepare_inputs", ("self", "scheduler_output")),
    Seam(
        _RUNNER,
        "TPUModelRunner._prepare_async_token_substitution_indices",
        ("self", "req_ids_dp", "scheduled_tokens_per_dp_rank"),
    ),
    Seam(
        "tpu_inference.layers.jax.sample.rejection_sampler",
        "RejectionSampler.__call__",
        (
            "self",
            "draft_token_ids",
            "num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
            "key",
        ),
    ),
    Seam(
        "tpu_inference.runner.structured_decoding_manager",
        "StructuredDecodingManager.prepare_structured_decoding_input",
        ("self", "logits", "grammar_output"),
    ),
    Seam(
        "tpu_inference.runner.structured_decoding_manager",
        "StructuredDecodingManager.structured_decode_fn",
        ("self", "require_struct_decoding", "grammar_bitmask", "logits", "arange"),
    ),
    Seam(
        "tpu_inference.runner.compilation_manager",
        "CompilationManager._precompile_structured_decoding",
        ("self",),
    ),
    Seam("tpu_inference.utils", "device_array", ("mesh",)),
    Seam(
        "tpu_inference.spec_decode.jax.utils",
        "extend_logits_simple",
        ("target_logits", "bonus_logits", "mesh"),
    ),
    Seam(
        "tpu_inference.models.common.model_loader",
        "resolve_model_impl_type",
        ("vllm_config",),
    ),
    Seam(
        "tpu_inference.platforms.tpu_platform",
        "TpuPlatform.check_and_update_config",
        ("vllm_config",),
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("self", "request_id", "prompt", "params"),
    ),
    Seam(
        "tpu_inference.spec_decode.jax.dflash",
        "DFlashProposer.prepare_inputs",
        (
            "self",
            "attn_metadata",
            "input_ids",
            "aux_hidden_states",
            "last_sampled_token_id",
            "next_prompt_token_id",
            "is_in_prefill",
            "num_rejected_tokens",
            "num_reqs_dp",
        ),
    ),
    Seam(
        "tpu_inference.spec_decode.jax.dflash",
        "DFlashProposer.propose",
        (
            "self",
            "kv_caches",
            "input_ids",
            "attn_metadata",
            "last_token_indices",
            "target_hidden_states",
        ),
    ),
    Seam(
        "tpu_inference.runner.compilation_manager",
        "CompilationManager._precompile_dflash_helpers",
        ("self",),
    ),
    Seam(
        "tpu_inference.runner.utils",
        "host_extract_sampled_tokens",
        ("runner", "spec_decode_metadata"),
    ),
    Seam("tpu_inference.worker.tpu_worker", "TPUWorker.init_device", ("self",)),
    Seam(
        "tpu_inference.worker.tpu_worker",
        "TPUWorker.initialize_from_config",
        ("self", "kv_cache_config"),
    ),
)


def check(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Warns about untested versions, and checks that every seam is there.

    Raises:
        RuntimeError: a seam is missing, or takes other parameters.
    """
    versions = {package: metadata.version(package) for package in TESTED}
    for package, version in versions.items():
        if version != TESTED[package]:
            logger.warning(
                "torchax-dflash is tested with %s %s, but %s is installed.",
                package,
                TESTED[package],
                version,
            )
    for seam in seams:
        if (problem := _problem(seam)) is not None:
            tested = ", ".join(f"{name} {version}" for name, version in TESTED.items())
            raise RuntimeError(
                f"{seam.module}.{seam.name}: expected {_shape(seam)}, got {problem} in "
                f"{versions}. This version does not work with torchax-dflash: install "
                f"{tested}, or switch the plugin off with TORCHAX_DFLASH_DISABLE=1."
            )


def _shape(seam: Seam) -> str:
    return f"a function of ({', '.join((*seam.parameters, '…'))})"


def _problem(seam: Seam) -> str | None:
    """What is wrong with a seam, or None."""
    try:
        found: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"nothing ({error})"
    parameters = tuple(inspect.signature(found).parameters)
    if parameters[: len(seam.parameters)] != seam.parameters:
        return f"({', '.join(parameters)})"
    return None
