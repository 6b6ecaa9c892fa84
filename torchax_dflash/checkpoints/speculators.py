# SPDX-License-Identifier: Apache-2.0
"""Configs of the `speculators` library, as configs of the `dflash` package's module.

    speculators                        dflash
    speculators_model_type: dflash     architectures: [DFlashDraftModel]
    transformer_layer_config           the config itself
    block_size                         block_size
    mask_token_id                      dflash_config.mask_token_id
    aux_hidden_state_layer_ids: i + 1  dflash_config.target_layer_ids: i
    sliding_window_non_causal: true    is_causal: false (without it, sliding layers are
                                       causal and full ones are not, in both)
    draft_vocab_size                   draft_vocab_size
    (none; our exports add it, and     num_target_layers
    mean transformers' states)

Source: speculators 0.9.0, `models/dflash/{config,core,attention}.py`. Its training
differs from the module in one point: there a sliding window reaches back from the
anchor for all rows of a block, in the module from each row. vLLM does as the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, Qwen3Config

from torchax_dflash.core.config import DFlashConfig, config_error

_REMEDY = "Correct the draft's config.json, or export it again."
_LAYER_TYPES = ("qwen3", "llama")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this format."""
    return "speculators_model_type" in raw or "speculators_config" in raw


def translate(raw: Mapping[str, Any]) -> Qwen3Config:
    """The config that the `dflash` package's module takes.

    Raises:
        ValueError: another kind of speculator, or a field that is missing or broken.
    """
    _check_kind(raw)
    try:
        config = Qwen3Config(**_layer_fields(raw))
    except StrictDataclassError as error:
        raise config_error(
            "transformer_layer_config",
            "the fields of transformers' Qwen3Config",
            " ".join(str(error).split()),
            _REMEDY,
        ) from error
    aux = raw.get("aux_hidden_state_layer_ids")
    aux = aux if isinstance(aux, list) else []
    if not aux or not all(type(i) is int and i >= 1 for i in aux):
        raise config_error(
            "aux_hidden_state_layer_ids",
            "a list of integers from 1, not empty (i means the input of layer i)",
            raw.get("aux_hidden_state_layer_ids"),
            _REMEDY,
        )
    for name in ("block_size", "mask_token_id"):
        if type(raw.get(name)) is not int:
            raise config_error(name, "an integer", raw.get(name), _REMEDY)
    if raw.get("target_hidden_size") not in (None, config.hidden_size):
        raise config_error(
            "target_hidden_size",
            f"the draft's hidden_size, {config.hidden_size}",
            raw["target_hidden_size"],
            "Drafts whose hidden size differs from their target's are not supported.",
        )
    if raw.get("sample_from_anchor"):
        raise config_error(
            "sample_from_anchor",
            "false",
            raw["sample_from_anchor"],
            "Drafts that predict from the anchor's row are not supported.",
        )
    config.architectures = ["DFlashDraftModel"]
    config.block_size = raw["block_size"]
    config.draft_vocab_size = raw.get("draft_vocab_size")
    config.dflash_config = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in aux],
    }
    # The module needs a number; `complete` removes it again if it is a guess.
    config.num_target_layers = raw.get("num_target_layers") or max(aux)
    if raw.get("sliding_window_non_causal"):
        config.is_causal = False
    return config


def complete(config: DFlashConfig, raw: Mapping[str, Any]) -> DFlashConfig:
    """The checked config, without a number of target layers that was only guessed."""
    known = raw.get("num_target_layers")
    return config if known is not None else replace(config, num_target_layers=None)


def _check_kind(raw: Mapping[str, Any]) -> None:
    """Refuses other algorithms, whose weights may have the same names."""
    about = raw.get("speculators_config")
    if not isinstance(about, Mapping):
        raise config_error("speculators_config", "a mapping", about, _REMEDY)
    kinds = {
        "speculators_model_type": raw.get("speculators_model_type"),
        "speculators_config.algorithm": about.get("algorithm"),
    }
    for name, kind in kinds.items():
        if kind != "dflash":
            raise config_error(name, "'dflash'", kind, "Choose another draft.")
    verifier = about.get("verifier")
    if not isinstance(verifier, Mapping) or not isinstance(
        verifier.get("name_or_path"), str | None
    ):
        raise config_error(
            "speculators_config.verifier",
            "a mapping with the target's name_or_path",
            verifier,
            _REMEDY,
        )


def _layer_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Qwen3Config, with defaults of other model types filled in.

    The layers are Qwen3's for every type, but a file leaves out fields that equal the
    defaults of its type.
    """
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise config_error("transformer_layer_config", "a mapping", layers, _REMEDY)
    kind = layers.get("model_type", "qwen3")
    if kind not in _LAYER_TYPES:
        raise config_error(
            "transformer_layer_config.model_type",
            f"one of {_LAYER_TYPES}",
            kind,
            "Layers of this kind are not supported.",
        )
    if kind != "qwen3":
        layers = AutoConfig.for_model(**layers).to_dict()
    return {name: value for name, value in layers.items() if name != "model_type"}
