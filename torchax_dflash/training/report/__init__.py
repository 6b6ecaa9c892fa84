# SPDX-License-Identifier: Apache-2.0
"""Evaluation, export and the model card."""
