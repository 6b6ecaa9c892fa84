# SPDX-License-Identifier: Apache-2.0
"""Tokens to text on a real byte-level tokenizer: partial characters, stop texts."""

import pytest
from generators import MAX_LEN
from tiny_models import pair
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from torchax_dflash import Generator, SamplingParams
from torchax_dflash.generation.text import TextStream


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes only: every character beyond ASCII takes several tokens."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>")


def run(tokenizer, text, stop=(), flush=True):
    stream, segments = TextStream(tokenizer, stop), []
    for index, token in enumerate(tokenizer(text).input_ids):
        segments += stream.push(token, from_draft=index % 2 == 1)
        if stream.stopped:
            break
    if flush:
        segments += stream.flush()
    assert "".join(piece for piece, _ in segments) == stream.text
    return stream, segments


def test_characters_of_several_tokens_come_whole(tokenizer):
    text = "Grüße, 世界 🎉!"
    stream, segments = run(tokenizer, text)
    assert stream.text == text
    assert all("\ufffd" not in piece for piece, _ in segments)


def test_special_tokens_are_no_text(tokenizer):
    stream, _ = run(tokenizer, "a<end>b")
    assert stream.text == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("one", ("one",), ""),
        ("one tw", ("two",), "one tw"),
        ("x世y", ("世",), "x"),
    ],
)
def test_stop_texts_across_tokens(tokenizer, text, stop, want):
    stream, _ = run(tokenizer, text, stop)
    assert stream.text == want
    assert stream.stopped == (want != text)


def test_what_may_become_a_stop_text_is_held_back(tokenizer):
    stream, _ = run(tokenizer, "one tw", ("two",), flush=False)
    assert stream.text == "one "


def test_segments_tell_their_origin(tokenizer):
    _, segments = run(tokenizer, "abcd", ("cd!",))
    assert segments == [("a", False), ("b", True), ("c", False), ("d", True)]


def test_empty_stop_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="stop: expected no empty string"):
        TextStream(tokenizer, ("",))


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="tokenizer: expected a fast tokenizer"):
        TextStream(object())


def test_stop_text_ends_generation_in_mid_block():
    """Through the generator: tokens up to the stop, nothing after, and it is freed."""
    tiny = pair("llama", False)
    words = {f"w{i}": i for i in range(32)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    dflash, plain = (
        Generator(tiny.target, draft, tokenizer=tokenizer, max_model_len=MAX_LEN)
        for draft in (tiny.draft, None)
    )
    free = dflash.generate(["w3 w9 w1"], SamplingParams(max_tokens=40))[0]
    assert free.text.split() == [f"w{i}" for i in free.token_ids if i != 2]
    events = list(dflash.stream(["w3 w9 w1"], SamplingParams(max_tokens=40)))
    pieces = [piece for event in events for piece, _ in event.segments]
    assert "".join(pieces) == free.text
    stop = free.text.split()[-1]
    alone = dflash.generate(["w3 w9 w1"], SamplingParams(stop=stop))
    assert alone[0].text == free.text.split(stop)[0]
    for stop in dict.fromkeys(free.text.split()[:12]):
        stop_text = f"{stop} "  # reached when the next word begins
        params = SamplingParams(max_tokens=40, stop=(stop_text,))
        got = dflash.generate(["w3 w9 w1"], params)[0]
        want = plain.generate(["w3 w9 w1"], params)[0]
        assert (got.text, got.token_ids) == (want.text, want.token_ids)
        assert got.text == free.text.split(stop_text)[0]
        assert got.finish_reason == "stop"
        assert sum(got.acceptance_lengths) == len(got.token_ids) - 1
        assert len(got.from_draft) == len(got.token_ids)
