# SPDX-License-Identifier: Apache-2.0
"""A new draft: shaped like its target, and initialised from the target's last layers.

What it takes from the target, where shapes allow (each was found to help):

    layers      the target's last ones; query and key norms, which targets like Llama do
                not have, start at the typical size of the target's queries and keys
    norm        the target's final norm
    fc          passes the last tapped layer through, and adds a little noise from the
                others
    hidden_norm the input norm of the target layer that the first draft layer copies

DFlash-2's convolutions start as the identity, its selector as weak noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import (
    DFlash2DraftModel,
    DFlashDraftModel,
    build_target_layer_ids,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Qwen3Config

from torchax_dflash.checkpoints.pretrained import DraftModel
from torchax_dflash.core.config import TargetConfig, config_error
from torchax_dflash.core.draft_weights import (
    CODEBOOK,
    CONV_KERNEL,
    CONV_PROJECTION,
    FC,
    HIDDEN_NORM,
    KEY_NORM,
    LAYERS,
    NORM,
    QUERY_NORM,
)

_TAPS = 5  # tapped layers, as in published drafts
# Of DFlash-2; published drafts also look one position back.
_CONV_KERNEL, _SELECTOR_RANK, _SELECTOR_TOP_K = 2, 64, 32
_TARGET = "model."  # what the names of the target's decoder begin with


def new_draft_config(
    target_folder: Path,
    *,
    num_layers: int,
    block_size: int,
    dflash2: bool = False,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
) -> Qwen3Config:
    """The transformers config of a draft for a target.

    Args:
        target_folder: the target's checkpoint.
        num_layers: of the draft.
        block_size: Q.
        dflash2: with DFlash-2's convolutions and candidate selector.
        mask_token_id: a token that does not occur in texts; None looks for one.
        target_layer_ids: tapped layers; None spreads five over the target.

    Raises:
        ValueError: `mask_token_id` is out of range, or no unused token was found.
    """
    hf_config = AutoConfig.from_pretrained(target_folder, trust_remote_code=False)
    text: Any = hf_config.get_text_config()
    target = TargetConfig.from_hf(hf_config)
    if target_layer_ids is None:
        ids = build_target_layer_ids(target.num_hidden_layers, _TAPS)
        target_layer_ids = tuple(sorted({max(0, i) for i in ids}))
    if mask_token_id is None:
        mask_token_id = _unused_token(target_folder, target.vocab_size)
    if not 0 <= mask_token_id < target.vocab_size:
        raise config_error(
            "--mask-token-id",
            f"0 to {target.vocab_size - 1}",
            mask_token_id,
            "Choose a token that does not occur in texts.",
        )
    config = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=text.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    draft_class = DFlash2DraftModel if dflash2 else DFlashDraftModel
    config.architectures = [draft_class.__name__]
    config.num_target_layers = target.num_hidden_layers
    config.block_size = block_size
    config.dflash_config = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
    }
    if dflash2:
        config.dflash_config |= {
            "conv_kernel_size": _CONV_KERNEL,
            "conv_group_size": target.head_dim,
            "selector_rank": _SELECTOR_RANK,
            "selector_top_k": min(_SELECTOR_TOP_K, target.vocab_size),
        }
    return config


def new_draft(
    config: Qwen3Config,
    target_folder: Path,
    *,
    feature_scale: np.ndarray,
    query_key_sizes: np.ndarray,
    seed: int,
) -> DraftModel:
    """A draft that starts from the target's last layers.

    Args:
        config: from `new_draft_config`.
        target_folder: the target's checkpoint.
        feature_scale: [F], typical size of each feature.
        query_key_sizes: [target layers, 2], typical size of the target's queries and
            keys, for norms that the target does not have.
        seed: of the random weights.
    """
    torch.manual_seed(seed)
    dflash2 = config.architectures == [DFlash2DraftModel.__name__]
    draft = (DFlash2DraftModel if dflash2 else DFlashDraftModel)(config)
    weights = _read_weights(target_folder)
    first = config.num_target_layers - config.num_hidden_layers
    own = draft.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            if name.endswith((QUERY_NORM, KEY_NORM)):
                layer = first + _layer(name)
                column = int(name.endswith(KEY_NORM))
                tensor.fill_(float(query_key_sizes[layer, column]))
        for name, tensor in own.items():
            source = weights.get(_source_of(name, first))
            if source is not None and source.shape == tensor.shape:
                tensor.copy_(source)
        for name, tensor in own.items():
            if name.endswith(CONV_KERNEL):  # [2, kernel, D]: the identity
                tensor.zero_()[:, 0] = 1
            elif name.endswith(CONV_PROJECTION):
                tensor.zero_()
            elif name.endswith(CODEBOOK):
                tensor.normal_(std=tensor.shape[1] ** -0.5)
        scale = torch.from_numpy(feature_scale.astype(np.float32))
        width = config.hidden_size
        taps = len(config.dflash_config["target_layer_ids"])
        fc = torch.randn(width, taps, width) * 0.02 / taps**0.5
        fc[:, -1] += torch.eye(width)
        own[FC].copy_(fc.reshape(width, -1) / scale)
    return DraftModel.from_torch(draft)


def _unused_token(target_folder: Path, vocab_size: int) -> int:
    """An id that the tokenizer does not use, or its last unused special token."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder, trust_remote_code=False)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    template = str(tokenizer.chat_template or "")
    unused = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and token_id not in tokenizer.all_special_ids
        and token.content not in template
    ]
    if not unused:
        raise config_error(
            "--mask-token-id",
            "a tokenizer with an unused special token, or the id of a token that does "
            "not occur in texts",
            None,
            "Name such an id.",
        )
    return max(unused)


def _source_of(name: str, first: int) -> str:
    """The name of the target's weight that a draft's weight starts from, or ""."""
    if name == NORM:
        return f"{_TARGET}{NORM}"
    if name == HIDDEN_NORM:
        return f"{_TARGET}{LAYERS}{first}.input_layernorm.weight"
    if not name.startswith(LAYERS):
        return ""
    rest = name.removeprefix(f"{LAYERS}{_layer(name)}.")
    return f"{_TARGET}{LAYERS}{first + _layer(name)}.{rest}"


def _layer(name: str) -> int:
    """The index of the layer that a weight belongs to."""
    return int(name.removeprefix(LAYERS).partition(".")[0])


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights
