# SPDX-License-Identifier: Apache-2.0
"""From files to core objects: finding a checkpoint, its format, its weights and where they lie."""
