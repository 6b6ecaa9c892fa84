# SPDX-License-Identifier: Apache-2.0
"""The proposer: what the runner calls in each step to ingest and to draft.

proposer.py      one served step, from accepted rows to drafts
step_inputs.py   what the runner tells about a step, and what follows from it
served_draft.py  the draft of an engine, the target's head, and the draft's cache
target_head.py   the target's embedding and output head, as the draft borrows them
drawn_drafts.py  what drafts were drawn from, until they are verified
warm_up.py       compiles all of this at start-up
"""
