# SPDX-License-Identifier: Apache-2.0
"""The models and the loss: what a training step computes.

initial_draft.py  the draft to train: a checkpoint, or a new one
new_draft.py      a new draft's config, and weights taken from its target
teacher.py        the target's hidden states and likeliest tokens
feature_store.py  the same, kept on disk
anchored.py       blocks at many anchors, in one forward of the unmodified draft
objective.py      settings of the loss
losses.py         the loss at a position, and how much the position counts
loss.py           the draft's tokens against the target's own choices
selector_loss.py  the same for DFlash-2's candidate selector
"""
