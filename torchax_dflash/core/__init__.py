# SPDX-License-Identifier: Apache-2.0
"""Draft and target as JAX programs. No files, no requests, no host loop.

    accept         which drafts are accepted, and the token after them
    drafting       from an anchor to draft tokens
    draft          the draft; `ingest`: aux hidden states -> K/V rows in its pool
    target         the offline target; `forward`: one causal pass over new rows
    sampling       from logits to probabilities to tokens
    vocabulary     embedding and head: the target's, or the draft's own
    kv_cache       the paged pool, and the cache object that PyTorch modules see
    bridge         an unmodified PyTorch module inside a JAX trace
    attention      which key a query sees; a block's attention over pages and itself
    int8           weights in a byte each
    draft_weights  the names of a draft's weights, and what follows from them
    config         what configs of checkpoints say, checked

A module imports only from below it in this list (import-linter holds this).
"""
