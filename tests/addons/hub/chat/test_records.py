"""The formats of lines, and what is said of lines of none."""

from __future__ import annotations

import json

import pytest

from tfdist.addons.hub.chat.records import RecordError, read_records, record_of

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"instruction": "2 + 2?", "output": "4", "input": ""},
        {"prompt": [ASKED], "completion": [ANSWERED]},
    ],
)
def test_formats_of_one_conversation(line):
    record = record_of(line, "f:1")
    assert record.messages() == (ASKED, ANSWERED) and not record.is_preference
    assert record.prompt == ((ASKED,) if "prompt" in line else ())


def test_alpaca_with_an_input_and_a_system_turn():
    line = {"system": "s", "instruction": "Add.", "input": "2 + 2", "output": "4"}
    assert [m["content"] for m in record_of(line, "f:1").messages()] == ["s", "Add.\n\n2 + 2", "4"]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
    ],
)
def test_preferences_of_messages(line):
    record = record_of(line, "f:1")
    assert record.is_preference and record.prompt == (ASKED,)
    assert record.answers == ((ANSWERED,), (WRONG,))
    assert record.messages(1) == (ASKED, WRONG)


def test_preferences_of_ultrafeedback():
    """The prompt is a text beside whole conversations; `messages` repeats the chosen one."""
    chosen, rejected = [ASKED, ANSWERED], [ASKED, WRONG]
    line = {"prompt": "2 + 2?", "chosen": chosen, "rejected": rejected, "messages": chosen}
    record = record_of(line, "f:1", answers=2)
    assert record.prompt == (ASKED,) and record.answers == ((ANSWERED,), (WRONG,))
    assert record_of(line, "f:1").messages() == (ASKED, ANSWERED)
    record = record_of({"chosen": [ANSWERED], "rejected": [WRONG]}, "f:1")
    assert record.prompt == () and record.messages(1) == (WRONG,)
    record = record_of({"prompt": "2 + 2?", "chosen": [ANSWERED], "rejected": [WRONG]}, "f:1")
    assert record.prompt == (ASKED,) and record.messages(1) == (ASKED, WRONG)


def test_arguments_of_tool_calls_may_be_text():
    """As in OpenAI's files; templates expect objects."""
    for arguments in ({"a": 2}, '{"a": 2}'):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        line = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
        found = record_of(line, "f:1").messages()[1]["tool_calls"][0]["function"]
        assert found == {"name": "add", "arguments": {"a": 2}}
        assert call["function"]["arguments"] == arguments


def test_texts():
    record = record_of({"prompt": "a", "chosen": "b", "rejected": "c"}, "f:1")
    assert (record.prompt, record.answers, record.messages()) == ("a", ("b", "c"), None)
    record = record_of({"text": "abc"}, "f:1")
    assert (record.prompt, record.answers) == ("", ("abc",))


def test_tools_may_be_text():
    for tools in ([TOOL], json.dumps([TOOL])):
        assert record_of({"messages": [ASKED], "tools": tools}, "f:1").tools == [TOOL]
    assert record_of({"messages": [ASKED], "tools": []}, "f:1").tools is None


def test_lines_of_a_file_are_numbered(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    assert [record.place for record in read_records(path)] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "A line must be a JSON object"),
        ("[" * 100_000, "A line must be a JSON object"),
        ("[1]", "A line must be a JSON object"),
        ("{}", "A line must have the keys messages"),
        ('{"messages": []}', "`messages` must be a list of messages"),
        ('{"messages": "hello"}', "`messages` must be a list of messages"),
        ('{"messages": [{"content": "a"}]}', "an object with a `role`"),
        ('{"messages": [{"role": "user"}]}', "must have a `content`, or `tool_calls`"),
        ('{"messages": [{"role": "user", "content": 3}]}', "must be text, or a list of parts"),
        ('{"conversations": [{"from": "alien", "value": "a"}]}', "`from` must be one of"),
        ('{"conversations": [{"from": "human"}]}', "an object with `from` and `value`"),
        ('{"instruction": 1, "output": "a"}', "`instruction` must be text"),
        ('{"text": null}', "`text` must be text"),
        ('{"text": "\\ud83d"}', "one half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": 2}]}',
            "`weight` of a message must",
        ),
        ('{"messages": [{"role": "assistant", "tool_calls": "a"}]}', "`tool_calls` must be a list"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}]}',
            "`arguments` of a tool call must be a JSON object",
        ),
        ('{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}', "all be text"),
        ('{"chosen": "a", "rejected": "b"}', "must have a `prompt`"),
        ('{"prompt": "p", "chosen": "a", "rejected": [{"role": "a", "content": "b"}]}', "both"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "{"}', "`tools` must be"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "`tools` must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "a"}\n' * 6 + line + "\n")
    with pytest.raises(RecordError) as error:
        list(read_records(path))
    assert str(error.value).startswith(f"{path}:7: ") and said in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_same_conversations_are_no_preference():
    with pytest.raises(RecordError, match="must be different"):
        record_of({"chosen": [ASKED], "rejected": [ASKED]}, "f:1")


def test_a_file_must_be_utf_8(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(RecordError, match="must be UTF-8"):
        list(read_records(path))
