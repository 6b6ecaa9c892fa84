# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads: the platform, the worker, options, and the versions they fit."""
