import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from turbomill.engine.detokenize import Detokenizer, StopStrings, TextStream

BYTES = byte_tokenizer()
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30)


def decode_bytes(ids):
    """A byte-level tokenizer, in plain Python."""
    return bytes(ids).decode("utf-8", errors="replace")


def chunks(draw, items):
    at = 0
    while at < len(items):
        size = draw(st.integers(0, 4))
        yield items[at : at + size]
        at += size


@given(st.data(), TEXT)
@example(None, "")
def test_pieces_are_the_text_and_never_half_a_character(data, text):
    detokenizer, out = Detokenizer(decode_bytes), ""
    for piece in chunks(data.draw, list(text.encode())) if data else []:
        out += detokenizer.feed(piece)
        assert text.startswith(out)
    assert out + detokenizer.flush() == text
    assert out == text  # nothing was left to flush: every character is complete


@given(st.lists(st.integers(0, 255), max_size=40))
def test_broken_bytes_become_what_decoding_all_at_once_gives(ids):
    detokenizer = Detokenizer(decode_bytes)
    out = "".join([detokenizer.feed([token]) for token in ids]) + detokenizer.flush()
    assert out == decode_bytes(ids)


def test_endless_broken_bytes_are_not_held_for_ever():
    detokenizer = Detokenizer(decode_bytes)
    assert len("".join([detokenizer.feed([0x80]) for _ in range(100)])) >= 95


@given(st.data(), TEXT)
def test_real_byte_level_tokenizer(data, text):
    ids = BYTES.encode(text)
    detokenizer = Detokenizer(BYTES.decode)
    out = "".join([detokenizer.feed(piece) for piece in chunks(data.draw, ids)]) + detokenizer.flush()
    assert out == text


def sentencepiece_like():
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "▁": 3, "a": 4} | {
        f"<0x{b:02X}>": 5 + b for b in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_leading_spaces_survive_a_decoder_that_strips_the_first():
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(list(ids)))
    assert [detokenizer.feed([token]) for token in (1, 2, 2, 4, 2)] == [
        "hello",
        " world",
        " world",
        "a",
        " world",
    ]


@given(st.lists(st.sampled_from(["€", "a", "😀", "é", "▁hello"]), max_size=8))
def test_byte_fallback_waits_for_whole_characters(parts):
    tokenizer = sentencepiece_like()
    ids, text = [], ""
    for part in parts:
        ids += [1] if part == "▁hello" else [4] if part == "a" else [5 + b for b in part.encode()]
        text += part.replace("▁", " ")
    text = text.removeprefix(" ")
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(list(ids)))
    assert detokenizer.feed(ids) + detokenizer.flush() == text


def test_special_tokens_may_be_skipped():
    def decode(ids):
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    detokenizer = Detokenizer(decode)
    ids = [300, 300, *"é".encode(), 300, *b"x", 300]
    assert "".join([detokenizer.feed([token]) for token in ids]) + detokenizer.flush() == "éx"


def reference_stop(text, stops):
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.data(),
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_over_any_cut(data, text, stops):
    expected, stopped = reference_stop(text, stops)
    matcher, out = StopStrings(stops), ""
    for piece in chunks(data.draw, text):
        out += matcher.feed(piece)
        assert expected.startswith(out), "text of a stop string was emitted"
        if matcher.matched:
            break
    if not matcher.matched:
        out += matcher.flush()
    assert (out, matcher.matched is not None) == (expected, stopped)


@pytest.mark.parametrize("cut", range(1, 6))
def test_text_stream_stops_within_a_character_split_over_tokens(cut):
    ids = list("ab€c€d".encode())
    stream = TextStream(decode_bytes, ["€d"])
    out = stream.feed(ids[:cut]) + stream.feed(ids[cut:], final=True)
    assert out == "ab€c" and stream.stopped


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_text_stream_counts_tokens_up_to_the_stop_string_however_many_come_at_once(cut):
    ids = list("ab€c€def".encode())
    stream = TextStream(decode_bytes, ["€d"])
    for begin in range(0, len(ids), cut):
        if not stream.stopped:
            stream.feed(ids[begin : begin + cut])
    assert stream.tokens == len("ab€c€d".encode())


def test_held_text_comes_out_at_the_end():
    stream = TextStream(decode_bytes, ["xyz"])
    assert stream.feed(list(b"abxy")) == "ab"
    assert stream.feed([], final=True) == "xy" and not stream.stopped
    assert TextStream(decode_bytes).feed([0xE2, 0x82], final=True) == "\ufffd"


def test_no_stop_string_within_the_least_length():
    """Nor one that begins there; however the tokens come."""
    decode = lambda ids: bytes(ids).decode()  # noqa: E731
    for cut in range(1, 8):
        text = TextStream(decode, ["ab"], unstoppable=3)
        tokens = list(b"xababcabd")
        out = "".join(text.feed(tokens[i : i + cut]) for i in range(0, len(tokens), cut) if not text.stopped)
        assert (out, text.stopped) == ("xab", True)
        text = TextStream(decode, ["ba"], unstoppable=3)
        out = "".join(text.feed(tokens[i : i + cut]) for i in range(0, len(tokens), cut))
        assert (out + text.feed([], final=True), text.stopped) == ("xababcabd", False)
