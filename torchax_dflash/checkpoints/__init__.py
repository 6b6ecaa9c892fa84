# SPDX-License-Identifier: Apache-2.0
"""From files to core objects: finding checkpoints, formats, weights and placement."""
