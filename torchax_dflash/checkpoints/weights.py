# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights as JAX arrays, by the names of the module they are for.

safetensors go straight to JAX, one tensor at a time: there is never a second copy of
the weights, neither here nor in PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from safetensors import SafetensorError, safe_open

from torchax_dflash.core.bridge import Params, TorchModule
from torchax_dflash.core.draft_weights import published_name

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INV_FREQ = "rotary_emb.inv_freq"  # some checkpoints carry this buffer


def load_params(built: TorchModule, folder: Path, dtype: jnp.dtype) -> Params:
    """All parameters of the module from a checkpoint; see `read_params`.

    Args:
        built: from `build_module`.
        folder: of the checkpoint.
        dtype: parameters are cast to it; buffers keep theirs.
    """
    params = {name: array.astype(dtype) for name, array in read_params(built, folder)}
    return params | buffers(built)


def params_of(built: TorchModule, module: torch.nn.Module, dtype: jnp.dtype) -> Params:
    """Copies the weights of a PyTorch module that is already in memory.

    Args:
        built: the same architecture, from `build_module`.
        module: the module with weights.
        dtype: parameters are cast to it; buffers keep theirs.
    """
    copied = copy_params(built, module)
    return {name: array.astype(dtype) for name, array in copied} | buffers(built)


def read_params(
    built: TorchModule, folder: Path, *, elsewhere: Collection[str] = ()
) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter of the module, in `linear_weights` layout, one at a time.

    Args:
        built: from `build_module`; a weight named in `built.tied` is not read.
        folder: of the checkpoint.
        elsewhere: tensors that may be in it and are read by others.

    Raises:
        FileNotFoundError: no safetensors in the folder.
        ValueError: a corrupt file, or names or shapes that are not the module's.
    """
    tied = dict(built.tied)
    wanted = {
        name: tuple(parameter.shape)
        for name, parameter in built.module.named_parameters(remove_duplicate=False)
        if name not in tied
    }
    published = {published_name(name): name for name in wanted}
    missing, unexpected = set(wanted), []
    for stored, array in tensors(folder):
        name = published.get(stored, stored)
        if name not in wanted:
            known = stored in tied or stored in elsewhere or _INV_FREQ in stored
            unexpected += [] if known else [stored]
            continue
        check_shape(name, array, wanted[name], folder)
        missing.remove(name)
        yield name, array.T.copy() if name in built.linear_weights else array
    if missing or unexpected:
        raise ValueError(
            f"{folder}: expected the weights of {type(built.module).__name__}, got "
            f"others: missing {_some(missing)}, unexpected {_some(unexpected)}. "
            "Config and weights do not belong together."
        )


def copy_params(
    built: TorchModule, module: torch.nn.Module
) -> Iterator[tuple[str, jax.Array]]:
    """As `read_params`, float32 copies from a module that is already in memory."""
    tied = dict(built.tied)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in tied:
            continue
        # A copy: JAX may alias a NumPy buffer that PyTorch goes on to change.
        tensor = parameter.detach().to(torch.float32)
        tensor = tensor.T if name in built.linear_weights else tensor
        yield name, jnp.array(tensor.numpy(), copy=True)


def buffers(built: TorchModule) -> Params:
    """The module's buffers, like RoPE frequencies."""
    return {
        name: jnp.array(buffer.numpy(), copy=True)
        for name, buffer in built.module.named_buffers()
    }


def check_shape(
    name: str, array: jax.Array, shape: tuple[int, ...], folder: Path
) -> None:
    """Raises ValueError unless a checkpoint's tensor has the shape that it must."""
    if array.shape != shape:
        raise ValueError(
            f"{name}: expected shape {shape} by the config, got {array.shape} in "
            f"{folder}. Config and weights do not belong together."
        )


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown) + more if names else "nothing"


def tensors(
    folder: Path, names: Collection[str] | None = None, *, framework: str = "flax"
) -> Iterator[tuple[str, Any]]:
    """All tensors of a checkpoint, sharded or not, or those of the names given.

    As JAX arrays, or with the framework "numpy", which knows 64 bit but no bfloat16.
    """
    index = folder / _INDEX
    if index.is_file():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / shard for shard in sorted(set(shards))]
    else:
        files = [folder / _SINGLE]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: expected the checkpoint's weights, found no such file. "
                "Only safetensors are read."
            )
        try:
            with safe_open(file, framework=framework) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if names is None or name in names:
                        yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{file}: expected a safetensors file, got one that cannot be read "
                f"({error}). Fetch it again."
            ) from error
