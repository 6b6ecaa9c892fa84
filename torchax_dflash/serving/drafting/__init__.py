# SPDX-License-Identifier: Apache-2.0
"""The proposer: what the runner calls each step to ingest and draft."""
