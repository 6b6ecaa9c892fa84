# SPDX-License-Identifier: Apache-2.0
"""Wrote tests/data/speculators-dflash: a draft of the real `speculators` library.

Usage: make_speculators_dflash.py FOLDER, where speculators 0.9.0 is installed.

A random draft with a reduced vocabulary and its own head, a full and a sliding layer
(whose window is wider than the texts, see speculators.py), saved by the library (its
copy of its own config.py left out). It leaves the embedding out, which is the target's.
And drafts.safetensors, what the library's own model says of some texts:

    embedding  [48, 32]          the target's
    features   [2, 12, 3 * 32]   the target's aux hidden states
    anchors    [2]               token ids, at position 12, after the features
    logits     [2, 3, 20]        of its drafts
    drafts     [2, 3]            the likeliest ones, in the target's vocabulary
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VOCAB, DRAFT_VOCAB, HIDDEN, BLOCK, MASK_ID, LENGTH = 48, 20, 32, 4, 5, 12


def main() -> None:
    torch.manual_seed(0)
    layers = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=64,
        use_sliding_window=True,
        initializer_range=0.15,
    )
    layers._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=DRAFT_VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 3, 4],
        mask_token_id=MASK_ID,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = DFlashDraftModel(config).eval()
    known = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[known] = True
    model.load_vocab_mappings(t2d, known - torch.arange(DRAFT_VOCAB))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    folder = Path(sys.argv[1])
    model.save_pretrained(folder)

    features = torch.randn(2, LENGTH, 3 * HIDDEN)
    anchors = torch.randint(VOCAB, (2,))
    logits = torch.stack(
        [logits_of(model, *text) for text in zip(features, anchors, strict=True)]
    )
    drafts = known[logits.argmax(-1)]
    found = {
        "embedding": model.embed_tokens.weight.detach(),
        "features": features,
        "anchors": anchors,
        "logits": logits,
        "drafts": drafts,
    }
    save_file(found, folder / "drafts.safetensors")


@torch.no_grad()
def logits_of(model, features, anchor):
    """[BLOCK - 1, DRAFT_VOCAB] after a text, by the library's forward for training.

    The text is padded, as an anchor must have a whole block behind it.
    """
    total = LENGTH + 2 * BLOCK
    hidden = torch.zeros(1, total, features.shape[-1])
    hidden[0, :LENGTH] = features
    input_ids = torch.zeros(1, total, dtype=torch.long)
    input_ids[0, LENGTH] = anchor
    is_anchor = torch.zeros(1, total)
    is_anchor[0, LENGTH] = 1
    _, logits, *_ = model._backbone_forward(
        hidden_states=hidden,
        input_ids=input_ids,
        loss_mask=is_anchor,
        verifier_last_hidden_states=torch.zeros(1, total, HIDDEN),
        document_ids=torch.zeros(1, total, dtype=torch.long),
        max_anchors=1,
    )
    return logits[0, 1:]


if __name__ == "__main__":
    main()
