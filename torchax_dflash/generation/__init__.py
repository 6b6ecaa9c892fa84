# SPDX-License-Identifier: Apache-2.0
"""Offline generation: prompts in, texts out.

    generator        admits prompts, lets the device run, reads tokens
    prefill          reads a prompt in chunks of a few static sizes
    step             one decode step, and the loop of steps on the device
    request          one prompt: what is asked, checked, and answered
    state            what a batch keeps on the device
    text             tokens to text, up to a stop string
    penalties        repetition, presence and frequency penalties
    sampling_params  how to continue a prompt (no torch, no JAX)
    outputs          what comes back
    stats            seconds, tokens, compilations

Imports go downwards in this list (import-linter holds this).
"""
