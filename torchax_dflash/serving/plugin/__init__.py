# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads: the platform and the worker, and what they check.

platform.py        chooses the worker, and refuses what DFlash cannot be combined with
worker.py          puts our parts into tpu-inference's model runner
options.py         `additional_config={"torchax_dflash": …}`
request_checks.py  what requests may ask for
versions.py        which tpu-inference this works with
"""
