# SPDX-License-Identifier: Apache-2.0
"""Detokenizes a stream of tokens, up to a stop string."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from torchax_dflash.core.config import config_error


class TextStream:
    """Decodes one output token by token; holds back what may become a stop string.

    Attributes:
        stopped: a stop string was reached; the text ends before it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        """Starts an empty output.

        Args:
            tokenizer: a fast tokenizer of transformers.
            stop: strings that end the output.

        Raises:
            ValueError: an empty stop string, or a slow tokenizer.
        """
        if any(not text for text in stop):
            raise config_error("stop", "no empty string", stop, "Remove it.")
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise config_error(
                "tokenizer",
                "a fast tokenizer (on the tokenizers library)",
                type(tokenizer).__name__,
                "Load it with AutoTokenizer, or pass token ids.",
            )
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._hold_back = max(map(len, stop), default=1) - 1
        self._text = ""
        self._pieces: list[tuple[str, bool]] = []  # not emitted yet
        self._emitted = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return self._text[: self._emitted]

    def push(self, token_id: int, *, from_draft: bool) -> list[tuple[str, bool]]:
        """Adds a token; returns the text that is final now, with its origin."""
        piece = self._decoder.step(self._tokenizer, token_id)
        if not piece:
            return []
        searched_from = max(0, len(self._text) - self._hold_back)
        self._text += piece
        self._pieces.append((piece, from_draft))
        found = [self._text.find(text, searched_from) for text in self._stop]
        ends = [position for position in found if position >= 0]
        if ends:
            self.stopped = True
            return self._emit(min(ends))
        return self._emit(len(self._text) - self._hold_back)

    def flush(self) -> list[tuple[str, bool]]:
        """Ends the output: returns what was held back, unless a stop string came."""
        return [] if self.stopped else self._emit(len(self._text))

    def _emit(self, end: int) -> list[tuple[str, bool]]:
        segments = []
        while self._emitted < end:
            piece, from_draft = self._pieces.pop(0)
            taken = piece[: end - self._emitted]
            if len(taken) < len(piece):
                self._pieces.insert(0, (piece[len(taken) :], from_draft))
            segments.append((taken, from_draft))
            self._emitted += len(taken)
        return segments


def chat_token_ids(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a question in a chat template, up to where the answer starts.

    Args:
        tokenizer: the target's, of transformers.
        question: what the user says.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise config_error(
            "chat_template",
            "a tokenizer with a chat template",
            None,
            "Use an instruction-tuned target, or prompts without a template (in "
            "training: --text).",
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return tokenizer(text, add_special_tokens=False).input_ids
