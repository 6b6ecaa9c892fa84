# SPDX-License-Identifier: Apache-2.0
"""What a draft is trained on and judged by: prompts, answers, token sequences.

prompts.py               prompt files: JSON lines or plain text
builtin_prompts.py       an endless mix, from prompts_code, _math and _chat.py
prompts_self.py          prompts that the target writes itself
answers.py               the target's answers to them
plain_text.py            ordinary texts instead of answers
sequences.py             both as token sequences, in one append-only file
padding.py               sequences as rows of one array
evaluation_questions.py  what drafts are judged by, and never trained on
phrases.py               the phrases of the built-in prompts (phrases.toml)
storage.py               files that are written whole or not at all
"""
