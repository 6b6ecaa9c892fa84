# SPDX-License-Identifier: Apache-2.0
"""Offline generation: requests, the decode step, and the loop around it."""
