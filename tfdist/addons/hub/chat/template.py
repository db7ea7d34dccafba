"""Chat templates: Jinja, set up as in transformers, and which part of the text is an answer.

The set-up is that of transformers' `chat_template_utils`: an immutable sandbox, `trim_blocks`, `lstrip_blocks`,
loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape, and `{% generation %}`.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox

from tfdist.addons.hub.chat.records import Messages, RecordError

#: A part of a text, from its first character to the one after its last.
Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant writes."""

    tags = {"generation"}

    def parse(self, parser):
        """The block as a call that puts marks around its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        begin, end = cast(tuple[str, str], self.environment.globals["_generation_marks"])
        return f"{begin}{caller()}{end}"


class ChatTemplate:
    """A template of conversations.

    Args:
        source: The Jinja source.
        variables: What it may use in addition to messages and tools, such as `bos_token`.

    Raises:
        ValueError: It is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self.source, self._variables = source, dict(variables)
        # Texts of users do not have them by chance.
        self._marks = tuple(f"\ue000{secrets.token_hex(8)}{letter}\ue001" for letter in "be")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        environment.globals["_generation_marks"] = self._marks
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"A chat template must be valid Jinja. Received: {error}.") from error

    def render(
        self,
        messages: Messages,
        place: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: The messages.
            place: Where they are, for messages of errors.
            tools: The tools.
            add_generation_prompt: Whether the begin of an answer follows.

        Raises:
            RecordError: The template refuses them.
        """
        return self._without_marks(self._rendered(messages, place, tools, add_generation_prompt))[0]

    def answers(
        self,
        messages: Messages,
        place: str,
        *,
        first: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the parts of it that the assistant writes and that have a weight.

        Args:
            messages: The messages.
            place: Where they are, for messages of errors.
            first: The first message whose text counts.
            tools: The tools.

        Raises:
            RecordError: The template refuses the messages; or it does not mark answers, and renders a part of the
                messages otherwise than the whole.
        """
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        text, spans = self._without_marks(self._rendered(messages, place, tools, False))
        if spans and len(spans) != len(turns):
            raise RecordError(
                f"The template must mark each answer once by `{{% generation %}}`. Received: "
                f"{len(spans)} marks for {len(turns)} answers.",
                place,
            )
        if not spans:
            spans = [self._by_prefixes(messages, at, text, place, tools) for at in turns]
        pairs = zip(turns, spans, strict=True)
        return text, [s for at, s in pairs if at >= first and messages[at].get("weight", 1)]

    def _by_prefixes(self, messages: Messages, at: int, text: str, place: str, tools) -> Span:
        begin = self._rendered(messages[:at], place, tools, True) if at else ""
        end = self._rendered(messages[: at + 1], place, tools, False)
        if not (text.startswith(end) and end.startswith(begin)):
            raise RecordError(
                f"The template renders the messages up to the answer in message {at + 1} otherwise than "
                "within the whole conversation, and does not mark answers. Use a template with "
                "`{% generation %}`, or split the conversation.",
                place,
            )
        return len(begin), len(end)

    def _rendered(self, messages: Messages, place: str, tools, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except RecursionError:
            said = "it calls itself without an end"
        except Exception as error:
            # A template is a program of someone else.
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise RecordError(f"The chat template cannot render the messages. Received: {said}.", place)

    def _without_marks(self, text: str) -> tuple[str, list[Span]]:
        begin, end = self._marks
        parts, spans, length = [], [], 0
        for place, piece in enumerate(text.split(begin)):
            inside, mark, rest = piece.partition(end)
            if place and mark:
                spans.append((length, length + len(inside)))
            parts += [inside, rest]
            length += len(inside) + len(rest)
        return "".join(parts), spans


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message):
    raise jinja2.TemplateError(message)


def _now(form):
    return datetime.datetime.now().strftime(form)
