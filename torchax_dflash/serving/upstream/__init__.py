# SPDX-License-Identifier: Apache-2.0
"""Faults of tpu-inference that make outputs wrong, each mended in a file of its own."""
