# SPDX-License-Identifier: Apache-2.0
"""Batches, steps, checkpoints: a run from start to end."""
