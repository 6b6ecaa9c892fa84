# SPDX-License-Identifier: Apache-2.0
"""Which drafts stand: the accept rule in the place of the runner's sampler."""
