"""What a text must be: JSON, JSON of a schema, a regex, one of some texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turbomill.errors import UsageError

Kind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Grammar:
    """A checked `response_format`; whether its text means anything is known when a tokenizer is there."""

    kind: Kind
    text: str  # JSON of the schema or of the list of texts; the regex; a Lark or GBNF grammar

    @property
    def name(self) -> str:
        """For messages."""
        return "the JSON schema" if self.kind == "json_schema" else f"the {self.kind}"


def parse_response_format(value: Any) -> Grammar | None:
    """A grammar from OpenAI's and LMDeploy's `response_format`; None: any text. Raises UsageError.

    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    {"type": "regex_schema", "regex_schema": REGEX}, {"type": "choice", "choice": [TEXT, ...]}, or
    {"type": "grammar", "grammar": LARK_OR_GBNF}.
    """
    if value is None or isinstance(value, Grammar):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar(ANY_OBJECT, "response_format")
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        return schema_grammar(schema, "response_format.json_schema.schema")
    if kind in OTHERS:
        return OTHERS[kind](value.get(kind), f"response_format.{kind}")
    known = ", ".join(("text", "json_object", "json_schema", *OTHERS))
    raise UsageError(f"response_format.type is {kind!r}, expected one of {known}")


def schema_grammar(schema: Any, option: str) -> Grammar:
    """JSON of a schema, which is a dict, or the JSON of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise UsageError(f"{option} is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise UsageError(f"{option} is {schema!r}, expected a JSON schema (an object)")
    try:
        # In the order given, in which the members are written.
        return Grammar("json_schema", json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option} is not JSON: {error}") from None


def regex_grammar(regex: Any, option: str) -> Grammar:
    """The whole text matches a regex (Rust's syntax: no look-around, no back references)."""
    return Grammar("regex", _text(regex, option, "a regex"))


def choice_grammar(choices: Any, option: str) -> Grammar:
    """The text is one of these."""
    good = isinstance(choices, list | tuple) and choices and all(isinstance(c, str) and c for c in choices)
    if not good:
        raise UsageError(f"{option} is {choices!r}, expected a list of texts")
    return Grammar("choice", json.dumps(list(choices)))


def lark_grammar(grammar: Any, option: str) -> Grammar:
    """A Lark grammar whose first rule is `start`, or a GBNF one whose first is `root`."""
    return Grammar("grammar", _text(grammar, option, "a Lark or GBNF grammar"))


def structured_outputs(value: Any, option: str) -> Grammar:
    """vLLM's field: {KIND: VALUE}, a kind of STRUCTURED."""
    given = {key: part for key, part in value.items() if part} if isinstance(value, Mapping) else {}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        raise UsageError(f"{option} is {value!r}, expected one of {', '.join(STRUCTURED)}")
    [(key, part)] = given.items()
    return STRUCTURED[key](part, f"{option}.{key}")


def _text(value: Any, option: str, expected: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{option} is {value!r}, expected {expected}")
    return value


STRUCTURED: dict[str, Callable[[Any, str], Grammar]] = {
    "json": schema_grammar,
    "json_object": lambda _, option: schema_grammar(ANY_OBJECT, option),
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}
OTHERS: dict[str, Callable[[Any, str], Grammar]] = {
    "regex_schema": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}
