"""Files of conversations, completions and preferences: JSON lines in the formats of the field.

| Keys of a line | Format |
|---|---|
| `messages` (and `tools`) | messages with `role` and `content`, as in Hugging Face's and OpenAI's files; one with `weight` 0 is not trained |
| `conversations` (and `system`) | ShareGPT: `from` and `value` |
| `instruction`, `output` (and `input`, `system`) | Alpaca |
| `prompt`, `completion` | text, or messages |
| `chosen`, `rejected` (and `prompt`) | preferences: text, or messages; also beside the `messages` of a conversation |
| `text` | text |
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.checkpoint.storage import read_bytes

Messages = tuple[Mapping[str, Any], ...]
#: What is rendered by a template, or taken as it is.
Part = Messages | str

_SHAREGPT_ROLES = {
    "assistant": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "gpt": "assistant",
    "human": "user",
    "model": "assistant",
    "observation": "tool",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
_MOST_SHOWN = 80


class RecordError(ValueError):
    """A line of a file is not a record.

    Args:
        text: What is wrong.
        place: The file and the number of the line, with which the message begins.
    """

    def __init__(self, text: str, place: str):
        super().__init__(f"{place}: {text}")


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a file.

    Attributes:
        place: The file and the number of the line, for messages.
        prompt: What comes before the answers, and is not trained; empty in a conversation.
        answers: One answer, or a chosen and a rejected one. A conversation is an answer of all its messages, of
            which those of the assistant are trained.
        tools: The tools that the template describes.
    """

    place: str
    prompt: Part
    answers: tuple[Part, ...]
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def is_preference(self) -> bool:
        """Whether there is a chosen and a rejected answer."""
        return len(self.answers) == 2

    def messages(self, answer: int = 0) -> Messages | None:
        """The whole conversation with one of the answers; None for text."""
        chosen = self.answers[answer]
        if isinstance(chosen, str) or (isinstance(self.prompt, str) and self.prompt):
            return None
        return (*self.prompt, *chosen)


def read_records(path: str | Path, answers: int = 1) -> Iterator[Record]:
    """The records of a file of JSON lines, in order; empty lines are skipped.

    Args:
        path: The file.
        answers: The answers that are wanted, of a line that has one and also two.

    Raises:
        OSError: The file cannot be read.
        RecordError: A line is not JSON, or not a record.
    """
    with io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig") as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                yield record_of(_object(line, f"{path}:{number}"), f"{path}:{number}", answers)


def _lines(file, path) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise RecordError(f"The file must be UTF-8. Received: {error}.", path) from error


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"A line must be a JSON object. Received: {error}.", place) from error
    if not isinstance(found, dict):
        raise _refuse(place, "a line must be a JSON object", found)
    if "\\ud" in line.lower():
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                "Texts must be Unicode. Received: one half of a surrogate pair, as in a text that was cut.",
                place,
            ) from error
    return found


def record_of(found: Mapping[str, Any], place: str, answers: int = 1) -> Record:
    """The record of a JSON object.

    Args:
        found: The object.
        place: Where it is, for messages.
        answers: As for `read_records`.

    Raises:
        RecordError: It has the keys of no format, or invalid values.
    """
    is_preference = "chosen" in found and "rejected" in found
    if is_preference and answers == 2:
        return _preference(found, place)
    if "messages" in found:
        return Record(
            place, (), (_messages(found["messages"], place, "messages"),), _tools(found, place)
        )
    if "conversations" in found:
        return Record(place, (), (_sharegpt(found, place),), _tools(found, place))
    if is_preference:
        return _preference(found, place)
    if "prompt" in found and "completion" in found:
        prompt, answer = (_part(found[key], place, key) for key in ("prompt", "completion"))
        return _checked(Record(place, prompt, (answer,), _tools(found, place)))
    if "instruction" in found and "output" in found:
        return Record(place, (), (_alpaca(found, place),))
    if "text" in found:
        return Record(place, "", (_text(found["text"], place, "text"),))
    keys = "messages; conversations; prompt and completion; chosen and rejected; instruction and output; or text"
    raise _refuse(place, f"a line must have the keys {keys}", sorted(found))


def _preference(found: Mapping[str, Any], place: str) -> Record:
    chosen, rejected = (_part(found[key], place, key) for key in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise _refuse(
            place, "`chosen` and `rejected` must both be text, or both messages", "one of each"
        )
    prompt = _part(found["prompt"], place, "prompt") if "prompt" in found else None
    if isinstance(chosen, str):
        if prompt is None:
            raise _refuse(place, "a preference of texts must have a `prompt`", sorted(found))
    elif prompt is None or isinstance(prompt, str):
        # Both are whole conversations, with the same begin; a text repeats that, or is the whole of it.
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        asked = ({"role": "user", "content": prompt},) if prompt and not shared else ()
        prompt, chosen, rejected = asked + chosen[:shared], chosen[shared:], rejected[shared:]
        if not (chosen and rejected):
            raise _refuse(place, "`chosen` and `rejected` must be different", "the same messages")
    return _checked(Record(place, prompt, (chosen, rejected), _tools(found, place)))


def _checked(record: Record) -> Record:
    kinds = {isinstance(part, str) for part in (record.prompt, *record.answers)}
    if len(kinds) > 1:
        raise _refuse(record.place, "prompt and answers must all be text, or all messages", "both")
    return record


def _part(value: Any, place: str, key: str) -> Part:
    return value if isinstance(value, str) else _messages(value, place, key)


def _text(value: Any, place: str, key: str) -> str:
    if not isinstance(value, str):
        raise _refuse(place, f"`{key}` must be text", value)
    return value


def _messages(value: Any, place: str, key: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise _refuse(place, f"`{key}` must be a list of messages", value)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refuse(
                place, f"each message of `{key}` must be an object with a `role`", message
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise _refuse(
                place, f"each message of `{key}` must have a `content`, or `tool_calls`", message
            )
        if content is not None and not isinstance(content, str | list):
            raise _refuse(
                place, "the `content` of a message must be text, or a list of parts", content
            )
        if message.get("weight", 1) not in (0, 1):
            raise _refuse(place, "the `weight` of a message must be 0 or 1", message["weight"])
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        ):
            raise _refuse(place, "`tool_calls` must be a list of objects", calls)
    return tuple(_with_arguments(message, place) for message in value)


def _with_arguments(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A message whose tool calls have arguments as objects, as templates expect; OpenAI's have their text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    found = []
    for call in calls:
        function = call.get("function")
        text = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(text, str):
            try:
                arguments = json.loads(text or "{}")
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                raise _refuse(place, "the `arguments` of a tool call must be a JSON object", text)
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return {**message, "tool_calls": found}


def _sharegpt(found: Mapping[str, Any], place: str) -> Messages:
    turns = found["conversations"]
    if not isinstance(turns, list) or not turns:
        raise _refuse(place, "`conversations` must be a list of turns", turns)
    messages = []
    if found.get("system"):
        messages.append({"role": "system", "content": _text(found["system"], place, "system")})
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise _refuse(place, "each turn must be an object with `from` and `value`", turn)
        role = _SHAREGPT_ROLES.get(str(turn.get("from")).lower())
        if role is None:
            roles = ", ".join(_SHAREGPT_ROLES)
            raise _refuse(place, f"`from` must be one of {roles}", turn.get("from"))
        messages.append({"role": role, "content": turn["value"]})
    return tuple(messages)


def _alpaca(found: Mapping[str, Any], place: str) -> Messages:
    texts = {
        key: _text(found.get(key) or "", place, key)
        for key in ("instruction", "input", "output", "system")
    }
    messages = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    asked = "\n\n".join(filter(None, (texts["instruction"], texts["input"])))
    messages += [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": texts["output"]},
    ]
    return tuple(messages)


def _tools(found: Mapping[str, Any], place: str) -> Sequence[Mapping[str, Any]] | None:
    tools = found.get("tools")
    if isinstance(tools, str):
        # Files of columns, such as Parquet, have objects as text.
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RecordError(
                f"`tools` must be a list of objects. Received: {error}.", place
            ) from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _refuse(place, "`tools` must be a list of objects", tools)
    return tools


def _refuse(place: str, rule: str, received: Any) -> RecordError:
    shown = repr(received)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    return RecordError(f"{rule[0].upper()}{rule[1:]}. Received: {shown}.", place)
