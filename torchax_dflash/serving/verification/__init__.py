# SPDX-License-Identifier: Apache-2.0
"""Which drafts are accepted: our accept rule in place of the runner's sampler.

rejection_sampler.py  what the runner calls; finds out what each draft was drawn from
programs.py           its programs: the accept rule of the core on the runner's rows
"""
