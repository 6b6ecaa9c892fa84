# SPDX-License-Identifier: Apache-2.0
"""Prompts, answers and the sequences they become."""
