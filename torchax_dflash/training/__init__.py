# SPDX-License-Identifier: Apache-2.0
"""Training drafts: the target's own answers, anchored blocks, a loss, a report.

    prompts    what to ask the target           (JSONL, text files, a built-in mix)
    sequences  what it answered                 sequences.jsonl
    features   what it thought meanwhile        features/00000.safetensors, …
    anchored   blocks at many positions, one forward of the unmodified draft
    loss       of the draft's words against the target's own choices
    selection  and of what DFlash-2's selector makes of them
    trainer    steps, checkpoints, exact resume
    evaluation acceptance through the real generator

`scripts/train_draft.py` is the command line over it.
"""
