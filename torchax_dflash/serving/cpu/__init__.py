# SPDX-License-Identifier: Apache-2.0
"""What the TPU stack needs to run on a CPU, for development and tests.

stack.py      what is replaced in tpu-inference and JAX, and why
attention.py  the attention kernels in plain JAX
experts.py    the grouped matrix product of mixtures of experts in plain JAX
"""
