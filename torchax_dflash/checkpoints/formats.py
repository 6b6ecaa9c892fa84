# SPDX-License-Identifier: Apache-2.0
"""Formats of draft checkpoints: their module, their config, their extra tensors.

    format                      recognised by            tapped layers
    `dflash` package, and hub   architectures, auto_map  target_layer_ids: i is the
    checkpoints with own code                            output of layer i
    `speculators` library       speculators_model_type   aux_hidden_state_layer_ids: i
                                                         is the input of layer i, so
                                                         the output of layer i - 1

The output of layer i is `hidden_states[i + 1]` of transformers. vLLM counts aux hidden
states as `speculators` does. For the last layer, transformers returns the state after
the final norm and vLLM the one before it: `speculators` drafts that tap it are refused.

A checkpoint of any format may hold tensors beside the module's own:

    embed_tokens.weight    [V, D]                 embeds noise blocks
    lm_head.weight         [draft_vocab_size, D]  gives the draft's logits
    d2t                    [draft_vocab_size]     token i of the head is i + d2t[i]
    t2d                    bool [V]               the tokens that the head knows

Their names are those of vLLM 0.32 (`models/qwen3_dflash.py`) and speculators 0.9.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dflash.model
import jax.numpy as jnp
import numpy as np
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from torchax_dflash.checkpoints import speculators
from torchax_dflash.checkpoints.weights import check_shape, tensors
from torchax_dflash.core.bridge import TorchModule
from torchax_dflash.core.config import DFlashConfig, config_error, remote_class
from torchax_dflash.core.draft_weights import (
    EMBEDDING,
    EXTRA_TENSORS,
    HEAD,
    KNOWN_TOKENS,
    TOKEN_OFFSETS,
)
from torchax_dflash.core.vocabulary import OwnVocabulary, rows_of_tokens

# A file that vLLM reads: the mask token's embedding, instead of the target's.
_MASK_EMBEDDING = "mask_embedding.pt"
ARCHITECTURES = {
    "DFlashDraftModel": dflash.model.DFlashDraftModel,
    "DFlash2DraftModel": dflash.model.DFlash2DraftModel,
}
"""Classes of the `dflash` package, by their name in checkpoints."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """What a checkpoint's config.json says.

    Attributes:
        module_class: to build, unmodified.
        hf_config: what the class takes.
        config: the same, checked.
        own_code: the checkpoint brings the class.
    """

    module_class: type
    hf_config: Any
    config: DFlashConfig
    own_code: bool


def read_config(folder: Path, *, trust_remote_code: bool) -> DraftCheckpoint:
    """Recognises a checkpoint's format and reads its config.

    Args:
        folder: of the checkpoint.
        trust_remote_code: run the checkpoint's own module, if it has one.

    Raises:
        ValueError: an unknown format or architecture, or a config that is broken.
    """
    raw = _read_json(folder / "config.json")
    if speculators.is_speculators(raw):
        hf_config = speculators.translate(raw)
        module_class, own_code = dflash.model.DFlashDraftModel, False
    else:
        hf_config = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        module_class, own_code = _module_class(hf_config, folder, trust_remote_code)
    if (scheme := raw.get("quantization_config")) is not None:
        raise config_error(
            "quantization_config",
            "none",
            scheme,
            "Quantised checkpoints are not supported: load the original, for int8 with "
            "quantization='int8'.",
        )
    if (folder / _MASK_EMBEDDING).exists():
        raise config_error(
            _MASK_EMBEDDING,
            "no such file",
            str(folder / _MASK_EMBEDDING),
            "Drafts with a separate embedding of the mask token are not supported: "
            "write it into embed_tokens.weight.",
        )
    config = DFlashConfig.from_hf(
        hf_config, has_selector=has_selector(module_class), own_code=own_code
    )
    if speculators.is_speculators(raw):
        config = speculators.complete(config, raw)
    return DraftCheckpoint(module_class, hf_config, config, own_code)


def has_selector(module_class: type) -> bool:
    """Whether it is a DFlash-2 module, which chooses among candidates."""
    return hasattr(module_class, "propose")


def read_vocabulary(
    built: TorchModule, folder: Path, config: DFlashConfig, dtype: jnp.dtype
) -> OwnVocabulary:
    """Reads the embedding and head that a checkpoint holds, if any.

    Args:
        built: the module; parameters of its own are not read here.
        folder: of the checkpoint.
        config: the checkpoint's.
        dtype: of embedding and head.

    Raises:
        ValueError: a tensor that the config needs is missing, has another shape, or
            maps to tokens that do not exist.
    """
    own = EXTRA_TENSORS - {name for name, _ in built.module.named_parameters()}
    size, known, width = config.vocab_size, config.draft_vocab_size, config.hidden_size
    found = dict(tensors(folder, own & {EMBEDDING, HEAD}))
    for name, rows in ((EMBEDDING, size), (HEAD, known)):
        if name in found:
            check_shape(name, found[name], (rows, width), folder)
            found[name] = found[name].astype(dtype)
    token_ids = _token_ids(folder, own, config)
    if HEAD not in found:
        if known != size or (token_ids != np.arange(size)).any():
            raise _missing(HEAD, folder, config)
        return OwnVocabulary(embedding=found.get(EMBEDDING))
    return OwnVocabulary(
        embedding=found.get(EMBEDDING),
        head=found[HEAD].T.copy(),
        row_of_token=rows_of_tokens(token_ids, size),
    )


def _token_ids(folder: Path, own: frozenset[str], config: DFlashConfig) -> np.ndarray:
    """The token of each row of the head, int [draft_vocab_size], checked."""
    names = own & {TOKEN_OFFSETS, KNOWN_TOKENS}
    found = dict(tensors(folder, names, framework="numpy"))
    size, known = config.vocab_size, config.draft_vocab_size
    token_ids = np.arange(known)
    if TOKEN_OFFSETS in found:
        offsets = found[TOKEN_OFFSETS]
        check_shape(TOKEN_OFFSETS, offsets, (known,), folder)
        if not np.issubdtype(offsets.dtype, np.integer):
            raise config_error(
                f"{TOKEN_OFFSETS} of {folder}",
                "integers",
                str(offsets.dtype),
                "Export the draft again.",
            )
        token_ids = token_ids + offsets
    elif known != size:
        raise _missing(TOKEN_OFFSETS, folder, config)
    outside = token_ids[(token_ids < 0) | (token_ids >= size)]
    if outside.size:
        raise config_error(
            f"{TOKEN_OFFSETS} of {folder}",
            f"i + d2t[i] from 0 to {size - 1}",
            sorted(set(outside.tolist()))[:3],
            "d2t must hold offsets from the draft's ids to the target's, not the ids.",
        )
    if len(set(token_ids.tolist())) < known:
        raise config_error(
            f"{TOKEN_OFFSETS} of {folder}",
            f"{known} different tokens",
            f"{len(set(token_ids.tolist()))}",
            "d2t must hold offsets from the draft's ids to the target's, not the ids.",
        )
    if KNOWN_TOKENS in found:
        mask = found[KNOWN_TOKENS]
        check_shape(KNOWN_TOKENS, mask, (size,), folder)
        if set(np.flatnonzero(mask).tolist()) != set(token_ids.tolist()):
            raise config_error(
                f"{KNOWN_TOKENS} of {folder}",
                f"true at the {known} tokens that d2t maps to",
                f"{int(np.count_nonzero(mask))} others",
                "The two mappings do not belong together.",
            )
    return token_ids


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise config_error(
            str(file), "JSON", str(error), "Download it again."
        ) from error
    if not isinstance(raw, dict):
        raise config_error(str(file), "a mapping", raw, "Download it again.")
    return raw


def _missing(name: str, folder: Path, config: DFlashConfig) -> ValueError:
    return config_error(
        f"{name} of {folder}",
        f"a tensor (draft_vocab_size is {config.draft_vocab_size}, vocab_size "
        f"{config.vocab_size})",
        None,
        "A draft with a reduced vocabulary needs lm_head.weight and d2t.",
    )


def _module_class(
    hf_config: Any, folder: Path, trust_remote_code: bool
) -> tuple[type, bool]:
    """The class to build, and whether it is the checkpoint's own code."""
    architecture = (hf_config.architectures or [None])[0]
    own_code = remote_class(hf_config)
    if trust_remote_code and own_code:
        return get_class_from_dynamic_module(own_code, str(folder)), True
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture], False
    remedy = "Choose another draft."
    if own_code:
        remedy = (
            "The checkpoint has its own code: read it, then load with "
            "trust_remote_code=True."
        )
    raise config_error(
        "architectures", f"one of {sorted(ARCHITECTURES)}", architecture, remedy
    )
