# SPDX-License-Identifier: Apache-2.0
"""The draft as JAX programs: the cache, attention, the bridge to torchax, drafting, accepting.

No files, no requests and no host loop: see `checkpoints` and `generation` for those."""
