# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafts in formats that nothing installed here writes."""

import copy
import json
import re

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, MASK_ID, TARGET_LAYERS, VOCAB

KNOWN = [1, 2, 4, 5, 8, 9, 10, 12, 15, 16, 17, 20, 21, 23, 26, 27, 28, 29, 30]


def write_speculators(folder, module, extra, **fields):
    """A checkpoint as the `speculators` library lays it out, of any module."""
    layers = json.loads(module.config.to_json_string(use_diff=True))
    for name in ("architectures", "block_size", "dflash_config", "num_target_layers"):
        layers.pop(name, None)
    config = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in module.target_layer_ids],
        "block_size": module.block_size,
        "draft_vocab_size": len(extra.get("lm_head.weight", range(VOCAB))),
        "mask_token_id": MASK_ID,
        "num_target_layers": TARGET_LAYERS,  # as in our exports: most here tap the last
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": module.block_size - 1}
            ],
            "verifier": {"architectures": [], "name_or_path": "someone/target"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(module.state_dict() | extra, folder / "model.safetensors")


def own_tensors(*, embedding=False, head=False, known=None):
    """Of a draft: its own embedding and head, over all tokens or those known."""
    generator = torch.Generator().manual_seed(11)
    found = {}
    if embedding:
        size = (VOCAB, HIDDEN)
        found["embed_tokens.weight"] = torch.randn(size, generator=generator) * 0.3
    if head:
        size = (len(known) if known else VOCAB, HIDDEN)
        found["lm_head.weight"] = torch.randn(size, generator=generator) * 0.3
    if known:
        found["d2t"] = torch.tensor(known) - torch.arange(len(known))
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        found["t2d"][known] = True
    return found


BRINGS = {
    "nothing": {},
    "embedding": {"embedding": True},
    "head": {"head": True},
    "both": {"embedding": True, "head": True},
    "head of some tokens": {"embedding": True, "head": True, "known": KNOWN},
    "head of some tokens, in no order": {
        "head": True,
        "known": [*KNOWN[7:], *KNOWN[:7]],
    },
}


LINEAR = re.compile(r"fc|[qkvo]_proj|(gate|up|down)_proj")


def rounded(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module whose linear weights are what int8 can hold.

    By NumPy, so that nothing here is what is tested.
    """
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if LINEAR.fullmatch(name.split(".")[-1]):
            weight = layer.weight.detach().numpy()
            scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
            scale[scale == 0] = 1
            layer.weight.data = torch.from_numpy(np.round(weight / scale) * scale)
    return module


def edit_config(folder, changes):
    """Sets fields of config.json (dotted names reach inside); None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        place = config
        for key in outer:
            place = place[key]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    path.write_text(json.dumps(config))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
