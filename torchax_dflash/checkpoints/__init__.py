# SPDX-License-Identifier: Apache-2.0
"""From files to core objects.

    pretrained    the public DraftModel and TargetModel, which load themselves
    sharding      how a draft's weights and cache are split over devices
    demo          the demo pair, without a model hub
    cache         what is kept in the user's cache
    formats       which module and config a draft's checkpoint means
    quantization  which weights become int8
    finding       a checkpoint's folder: of this machine, or from the hub
    build         the module's class, constructed without weights
    speculators   configs of the `speculators` library
    weights       tensors by the names of the module they are for

Imports go downwards in this list (import-linter holds this).
"""
