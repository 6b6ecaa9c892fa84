# SPDX-License-Identifier: Apache-2.0
"""Training of drafts: from prompts to a checkpoint and a report.

    prompts -> answers of the target -> features -> steps -> checkpoint -> acceptance

    data/    prompts, and token sequences: the target's own answers, or texts
    model/   the draft to train, the teacher's outputs, the forward and the loss
    run/     batches, steps, checkpoints, exact resume
    report/  export, evaluation through the real generator, a model card

Each folder imports only from those above it. The command `torchax-dflash train` is in
`torchax_dflash.cli`.
"""
