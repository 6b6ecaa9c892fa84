# SPDX-License-Identifier: Apache-2.0
"""The teacher, the training forward and the losses."""
