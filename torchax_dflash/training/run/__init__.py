# SPDX-License-Identifier: Apache-2.0
"""A training run, from its first step or its latest checkpoint to its last step.

recipe.py         hyperparameters
trainer.py        one training step
mesh.py           the same on several devices
batches.py        which sequences and anchors each step sees
initial_state.py  the state before the first step
checkpoint.py     what an exact resume needs, on disk
training_run.py   the loop: steps, log lines, held-out scores, checkpoints
"""
