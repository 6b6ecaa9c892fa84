# SPDX-License-Identifier: Apache-2.0
"""The public models: core objects that load themselves from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from transformers import AutoConfig, GenerationConfig

from torchax_dflash.checkpoints.build import build_module
from torchax_dflash.checkpoints.finding import find_checkpoint
from torchax_dflash.checkpoints.formats import (
    has_selector,
    read_config,
    read_vocabulary,
)
from torchax_dflash.checkpoints.quantization import check_quantization, kept_weights
from torchax_dflash.checkpoints.weights import (
    buffers,
    copy_params,
    load_params,
    params_of,
    read_params,
)
from torchax_dflash.core.bridge import TorchModule
from torchax_dflash.core.config import DFlashConfig, TargetConfig, config_error
from torchax_dflash.core.draft import Draft, keeps_context_apart
from torchax_dflash.core.draft_weights import EXTRA_TENSORS
from torchax_dflash.core.target import Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModel(Draft):
    """A DFlash draft; load one with `from_pretrained` or `from_torch`."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        quantization: str | None = None,
    ) -> DraftModel:
        """Loads a DFlash draft of any format that `formats.py` knows.

        Args:
            name_or_path: a checkpoint folder or a hub id.
            dtype: of weights, cache and computation: the target's.
            trust_remote_code: run the module that the checkpoint brings, instead of
                the `dflash` package's class of the same name.
            quantization: "int8" keeps linear weights in a byte each.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: an unknown format, architecture or quantization, or a config or
                weights that are broken.
        """
        check_quantization(quantization)
        folder = find_checkpoint(name_or_path)
        checkpoint = read_config(folder, trust_remote_code=trust_remote_code)
        built = build_module(checkpoint.module_class, checkpoint.hf_config)
        weights = read_params(built, folder, elsewhere=EXTRA_TENSORS)
        draft = cls(
            params=kept_weights(weights, jnp.dtype(dtype), quantization)
            | buffers(built),
            module=built,
            config=checkpoint.config,
            dtype=jnp.dtype(dtype),
            own=read_vocabulary(built, folder, checkpoint.config, jnp.dtype(dtype)),
        )
        if checkpoint.own_code and not keeps_context_apart(draft):
            raise config_error(
                "auto_map",
                "a DFlash module, whose K and V of context rows do not depend on its "
                "MLPs and output projections",
                checkpoint.module_class.__name__,
                "This architecture is not supported.",
            )
        return draft

    @classmethod
    def from_torch(
        cls, module: Any, *, dtype: str = "float32", quantization: str | None = None
    ) -> DraftModel:
        """Copies the weights of a DFlash module that is already in memory.

        Args:
            module: a `DFlashDraftModel`, `DFlash2DraftModel` or one like them, with
                its transformers config as `config`.
            dtype: of weights, cache and computation.
            quantization: "int8" keeps linear weights as int8.

        Raises:
            ValueError: an unknown quantization, or a config that is broken.
        """
        check_quantization(quantization)
        hf_config = type(module.config).from_dict(module.config.to_dict())
        built = build_module(type(module), hf_config)
        weights = copy_params(built, module)
        return cls(
            params=kept_weights(weights, jnp.dtype(dtype), quantization)
            | buffers(built),
            module=built,
            config=DFlashConfig.from_hf(
                hf_config, has_selector=has_selector(type(module)), own_code=True
            ),
            dtype=jnp.dtype(dtype),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetModel(Target):
    """An offline target; load one with `from_pretrained` or `from_torch`."""

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, dtype: str = "float32"
    ) -> TargetModel:
        """Loads a causal language model of transformers.

        Args:
            name_or_path: a checkpoint folder or a hub id.
            dtype: of weights, cache and computation. float32 is where speculative
                decoding is lossless to the token; bfloat16 is for speed.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: an architecture or config that is not supported.
        """
        folder = find_checkpoint(name_or_path)
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        generation_config = None
        if (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        config = TargetConfig.from_hf(hf_config, generation_config)
        built = _build_target(hf_config)
        return cls(
            params=load_params(built, folder, jnp.dtype(dtype)),
            module=built,
            config=config,
            dtype=jnp.dtype(dtype),
        )

    @classmethod
    def from_torch(cls, model: Any, *, dtype: str = "float32") -> TargetModel:
        """Copies the weights of a transformers model that is already in memory.

        Args:
            model: a causal language model of transformers.
            dtype: of weights, cache and computation.

        Raises:
            ValueError: an architecture or config that is not supported.
        """
        hf_config = type(model.config).from_dict(model.config.to_dict())
        hf_config.architectures = [type(model).__name__]
        config = TargetConfig.from_hf(hf_config, model.generation_config)
        built = _build_target(hf_config)
        return cls(
            params=params_of(built, model, jnp.dtype(dtype)),
            module=built,
            config=config,
            dtype=jnp.dtype(dtype),
        )


def _build_target(hf_config: Any) -> TorchModule:
    architecture = (hf_config.architectures or [""])[0]
    known = hasattr(transformers, architecture) if architecture else False
    if not known or not architecture.endswith("ForCausalLM"):
        raise config_error(
            "architectures",
            "a causal language model of transformers, like LlamaForCausalLM",
            hf_config.architectures,
            "Targets with code of their own are not supported offline.",
        )
    built = build_module(getattr(transformers, architecture), hf_config)
    if not hf_config.get_text_config().tie_word_embeddings:
        return built
    # One array for both, laid out for the head; embeddings are gathered columns.
    embedding = built.weight_name("get_input_embeddings")
    head = built.weight_name("get_output_embeddings")
    return replace(
        built,
        linear_weights=built.linear_weights - {head} | {embedding},
        tied=((head, embedding),),
    )
