# SPDX-License-Identifier: Apache-2.0
"""The draft as JAX programs: cache, attention, the bridge to torchax, drafting, accept.

No files, no requests and no host loop: see `checkpoints` and `generation` for those.
"""
