# SPDX-License-Identifier: Apache-2.0
"""What the TPU stack needs to run on a CPU, for development and tests."""
