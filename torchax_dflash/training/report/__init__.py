# SPDX-License-Identifier: Apache-2.0
"""What comes out of training: checkpoints, acceptance, a report.

export.py      a draft as a checkpoint folder
evaluation.py  how many draft tokens the target accepts, through the real generator
model_card.py  the evaluation as report.json, report.png and a model card
"""
