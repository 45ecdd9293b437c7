"""Tokens to text, piece by piece: no broken characters, and no text that belongs to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
# A UTF-8 character has at most four bytes, so that many tokens in a row without an end are not one character.
MAX_HELD_TOKENS = 4


class Detokenizer:
    """Decodes a growing sequence. The pieces concatenate to `decode` of the whole sequence.

    Only a window is decoded again: it begins at an earlier clean border, because some decoders treat the
    first token specially (they drop its leading space).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were returned
        self._clean = 0  # tokens of the window whose text was returned in full

    def feed(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is now certain."""
        # One by one: with byte tokens, a whole run decodes to U+FFFD while its last character is incomplete.
        return "".join([self._feed_one(token) for token in token_ids])

    def _feed_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # Only the last replacement character can still become another one.
            held = len(self._window) - self._clean
            return self._take(text[:-1]) if held > MAX_HELD_TOKENS else ""
        piece = self._take(text)
        tail = self._window[self._clean :]
        if tail_text := self._decode(tail):
            self._window, self._sent = tail, len(tail_text)
        self._clean = len(self._window)
        return piece

    def flush(self) -> str:
        """The rest, when no more tokens come: an incomplete character becomes U+FFFD."""
        return self._take(self._decode(self._window)) if len(self._window) > self._clean else ""

    def _take(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece


class StopStrings:
    """Ends a text before the first stop string, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Add text; return what can no longer be part of a stop string. Sets `matched` at the first one."""
        if not self._stops:
            return piece
        text = self._held + piece
        # The one that ends first wins, as it would if the text came character by character.
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return text[:at]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when no more comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class TextStream:
    """Tokens in, text out, until a stop string: a detokenizer followed by a stop string filter.

    The text of the first `unstoppable` tokens cannot contain a stop string, or begin one.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), unstoppable: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._unstoppable = unstoppable
        self.tokens = 0  # that the text is of, the one that completed a stop string included

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; nothing after it counts."""
        return self._stops.matched is not None

    def feed(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Text for these tokens, up to a stop string; with `final`, also everything held back."""
        text = ""
        for token in token_ids:
            piece = self._detokenizer.feed([token])
            text += piece if self.tokens < self._unstoppable else self._stops.feed(piece)
            self.tokens += 1
            if self.stopped:
                return text
        if final and not self.stopped:
            text += self._stops.feed(self._detokenizer.flush())
        if final and not self.stopped:
            text += self._stops.flush()
        return text
