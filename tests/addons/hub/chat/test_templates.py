"""Texts, ids and answers of templates: those of transformers (`make_golden.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.addons.hub.chat.templates import CONVERSATIONS, TEMPLATES
from tfdist.addons.hub.chat.records import RecordError, record_of
from tfdist.addons.hub.chat.rows import rows_of, shown
from tfdist.addons.hub.chat.template import ChatTemplate
from tfdist.addons.hub.chat.tokenizer import ChatTokenizer

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())["cases"]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((HERE / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def named(case) -> str:
    return f"{case['template']}-{case['conversation']}{'-prompt' if case['prompt'] else ''}"


@pytest.mark.parametrize("case", GOLDEN, ids=named)
def test_as_transformers(folder, case):
    tokenizer = ChatTokenizer(folder, TEMPLATES[case["template"]])
    given = CONVERSATIONS[case["conversation"]]
    options = {"tools": given.get("tools"), "add_generation_prompt": case["prompt"]}
    if "error" in case:
        with pytest.raises(RecordError, match=r"^here:1: The chat template cannot render"):
            tokenizer.template.render(given["messages"], "here:1", **options)
        return
    text = tokenizer.template.render(given["messages"], "here:1", **options)
    assert text == case["text"]
    assert tokenizer.encode(text).ids == case["ids"]


def rows(folder, template: str, conversation: str):
    tokenizer = ChatTokenizer(folder, TEMPLATES[template])
    return tokenizer, rows_of(record_of(CONVERSATIONS[conversation], "here:1"), tokenizer)[0]


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN if case.get("mask") and not case["prompt"]],
    ids=named,
)
def test_answers_are_those_of_transformers(folder, case):
    """Where the template marks them."""
    if "[{'type'" in case["text"]:
        # A model would learn to write Python's lists.
        with pytest.raises(RecordError, match="must support a `content` of parts"):
            rows(folder, case["template"], case["conversation"])
        return
    _, row = rows(folder, case["template"], case["conversation"])
    assert list(row.ids) == case["ids"]
    assert list(map(int, row.trained)) == case["mask"]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        ("chatml", ["Good day. <|im_end|>", "It is true, naïvely: ✓<|im_end|>"]),
        ("chatml-marked", ["Good day. <|im_end|>", "It is true, naïvely: ✓<|im_end|>"]),
        ("headers", ["Good day.<|eot_id|>", "It is true, naïvely: ✓<|eot_id|>"]),
        ("namespaces", ["Good day.</s>", "It is true, naïvely: ✓</s>"]),
        ("macros", ["Good day.<|im_end|>", "It is true, naïvely: ✓<|im_end|>"]),
    ],
)
def test_trained_texts(folder, template, answers):
    tokenizer, row = rows(folder, template, "system")
    found: list[list[int]] = []
    for before, now, number in zip((False, *row.trained), row.trained, row.ids, strict=False):
        if now and not before:
            found.append([])
        if now:
            found[-1].append(number)
    assert [tokenizer.decode(ids) for ids in found] == answers
    page = shown(row, tokenizer)
    assert page.startswith(f"here:1: {len(row)} tokens, {row.targets} trained (>)")
    assert sum(line.startswith(">") for line in page.splitlines()) == row.targets


REWRITES = """{% for message in messages %}{% if loop.last or message.role == 'user' -%}
{{ '<|im_start|>' + message.role + message.content + '<|im_end|>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "conversation", "said"),
    [
        (REWRITES, "system", "message 3 otherwise than within the whole conversation"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "short", "must end in a token that"),
        (
            "{{ bos_token + bos_token }}" + TEMPLATES["chatml"],
            "short",
            "one first token. Received: two",
        ),
        ("{{ raise_exception('no such role') }}", "short", "Received: no such role"),
        ("{{ messages[7].content }}", "short", "has no element 7"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "short",
            "it calls itself without an end",
        ),
        ("{{ ''.__class__.__mro__ }}", "short", "is unsafe"),
        ("{{ messages.append(1) }}", "short", "is unsafe"),
        ("{% generation %}x{% endgeneration %}", "system", "Received: 1 marks for 2 answers"),
    ],
)
def test_a_template_that_cannot_be_used_is_named_with_the_line(
    folder, template, conversation, said
):
    tokenizer = ChatTokenizer(folder, template)
    with pytest.raises(RecordError) as error:
        rows_of(record_of(CONVERSATIONS[conversation], "chats.jsonl:7"), tokenizer)
    assert str(error.value).startswith("chats.jsonl:7: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_must_be_jinja():
    with pytest.raises(ValueError, match="must be valid Jinja"):
        ChatTemplate("{% for %}", {})


def test_where_the_template_is(folder):
    assert ChatTokenizer(folder).template is None
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for found, expected in (("one", "one"), (several, "d")):
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**CONFIG, "chat_template": found})
        )
        assert ChatTokenizer(folder).template.source == expected
    (folder / "chat_template.jinja").write_text("file")
    assert ChatTokenizer(folder).template.source == "file"
    assert ChatTokenizer(folder, "given").template.source == "given"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "must have tokenizer.json"),
        ("tokenizer.json", "{}", "must be a file of the package `tokenizers`"),
        ("tokenizer_config.json", "{", "must be JSON"),
        ("tokenizer_config.json", "[1]", "must be a JSON object"),
    ],
)
def test_broken_folders(folder, name, content, said):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        ChatTokenizer(folder)


def stops(folder, template: str | None = None) -> set[str]:
    tokenizer = ChatTokenizer(folder, template)
    return {tokenizer.token(number) for number in tokenizer.stops}


def test_tokens_that_end_an_answer(folder):
    """Not those within an answer, such as of a channel or a tool call."""
    assert stops(folder, TEMPLATES["headers"]) == {"</s>", "<|eot_id|>"}
    assert stops(folder, TEMPLATES["chatml"]) == {"</s>", "<|im_end|>"}
    assert stops(folder, "{{ raise_exception('tools') }}") == stops(folder) == {"</s>"}
    ends = [
        ChatTokenizer(folder)._tokenizer.token_to_id(name) for name in ("<|end|>", "<|eot_id|>")
    ]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert stops(folder, TEMPLATES["chatml"]) == {"</s>", "<|end|>", "<|eot_id|>", "<|im_end|>"}


def test_ends_of_folders_without_names(folder):
    """As that of GPT-2, and those of earlier versions of transformers."""
    (folder / "tokenizer_config.json").unlink()
    assert ChatTokenizer(folder).eos is None and "<|im_start|>" in stops(folder)
    end = ChatTokenizer(folder)._tokenizer.token_to_id("</s>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end}))
    assert ChatTokenizer(folder).eos == end and stops(folder) == {"</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert stops(folder) == {"</s>", "<|end|>"}
    assert ChatTokenizer(folder, "{{ eos_token }}").template.render((), "here") == "<|end|>"


def test_a_message_without_weight_is_not_trained(folder):
    messages = [dict(each) for each in CONVERSATIONS["system"]["messages"]]
    first = next(each for each in messages if each["role"] == "assistant")
    first["weight"] = 0
    tokenizer = ChatTokenizer(folder, TEMPLATES["chatml"])
    (row,) = rows_of(record_of({"messages": messages}, "here:1"), tokenizer)
    trained = [number for number, kept in zip(row.ids, row.trained, strict=True) if kept]
    assert tokenizer.decode(trained) == "It is true, naïvely: ✓<|im_end|>"
    for each in messages:
        each["weight"] = 0
    with pytest.raises(RecordError, match="none, or of weight 0"):
        rows_of(record_of({"messages": messages}, "here:1"), tokenizer)
