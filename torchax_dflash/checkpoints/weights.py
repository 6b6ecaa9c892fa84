# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: an unmodified module without weights, and its weights as JAX arrays.

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
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from torchax_dflash.core.bridge import ATTENTION, Params, TorchModule
from torchax_dflash.core.config import sliding_layers

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INV_FREQ = "rotary_emb.inv_freq"  # some checkpoints carry this buffer


def find_checkpoint(name_or_path: str | Path) -> Path:
    """The local folder of a checkpoint: as given, or downloaded from the hub.

    Raises:
        FileNotFoundError: no such folder, and not to be had from the hub either.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder}: expected a checkpoint folder, found no config.json in it. "
                "Name the folder that holds config.json and model.safetensors."
            )
        return folder
    name = str(name_or_path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_like_path:
        raise FileNotFoundError(
            f"{name}: expected a checkpoint folder or a hub id (owner/name), found no "
            "such folder. Check the spelling."
        )
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    patterns.append("mask_embedding.pt")  # of some drafts, which are refused
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=["consolidated*"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name}: expected a checkpoint folder or a model on the hub, found no "
            f"such folder and could not download it ({error}). Check the spelling, the "
            "network, and your access to the model."
        ) from error


def build_module(module_class: type[torch.nn.Module], hf_config: Any) -> TorchModule:
    """Constructs the module as its class does, with parameters that hold no memory.

    Buffers (RoPE frequencies) are real. Attention is ours where the module asks its
    config.
    """
    hf_config._attn_implementation = ATTENTION
    # Experts: the other implementations are kernels that torchax does not lower.
    hf_config._experts_implementation = "batched_mm"
    with _EmptyOnMeta():
        module = module_class(hf_config)
    module.eval()
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            submodule.register_parameter(name, empty)
    linear_weights = frozenset(
        f"{name}.weight"
        for name, submodule in module.named_modules()
        if isinstance(submodule, torch.nn.Linear)
    )
    return TorchModule(
        module=module,
        linear_weights=linear_weights,
        num_layers=hf_config.get_text_config().num_hidden_layers,
        sliding_layers=sliding_layers(hf_config),
    )


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
    missing, unexpected = set(wanted), []
    for stored, array in tensors(folder):
        # DFlash-2's codebooks are embeddings, published without the last word.
        name = stored if stored in wanted else f"{stored}.weight"
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


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` gives meta tensors: layers allocate their parameters with it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
