"""The tokenizer and the chat template of a folder of Hugging Face."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.addons.hub.chat.template import ChatTemplate, Span
from tfdist.utils import checks

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = "special_tokens_map.json"
#: Files with the ids of ends, the first one first.
_WITH_IDS = ("generation_config.json", "config.json")


#: What no template has.
_ANSWER = "Answer-7c1f"


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A text as tokens.

    Attributes:
        ids: The ids.
        spans: The part of the text that each token stands in.
    """

    ids: list[int]
    spans: list[Span]


class ChatTokenizer:
    """Encodes texts exactly as transformers does with this folder.

    Args:
        folder: A folder with tokenizer.json, and optionally tokenizer_config.json, special_tokens_map.json,
            chat_template.jinja, generation_config.json and config.json.
        template: The source of a chat template, in place of that of the folder.

    Attributes:
        template: The chat template; None without one.
        bos: The id of the first token of a text; None without one.
        eos: The id of the last token of a text; None without one.
        stops: The ids of tokens that end an answer: those that the folder names, and the one with which the template
            ends an answer; without any all special tokens.

    Raises:
        ImportError: The packages `tokenizers` or `jinja2` are missing.
        ValueError: A file is missing or broken.
    """

    def __init__(self, folder: str | Path, template: str | None = None):
        self.folder = Path(checks.path("folder", folder))
        if template is not None:
            checks.instance("template", template, str, "a template's source")
        self._tokenizer = _read_tokenizer(self.folder / _TOKENIZER)
        config = _read_json(self.folder / _SPECIAL) | _read_json(self.folder / _CONFIG)
        added = self._tokenizer.get_added_tokens_decoder()
        names = {
            key: _content(config.get(key))
            for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        self._names = {key: name for key, name in names.items() if name is not None}
        self.bos = self._id(names["bos_token"])
        self._special = frozenset(number for number, token in added.items() if token.special)
        source = _source(self.folder, config) if template is None else template
        self.template = None if source is None else ChatTemplate(source, self._names)
        ends = self._named_ends()
        own = self._id(names["eos_token"])
        # GPT-2's own folder has it only as an id.
        self.eos = next(iter(ends), None) if own is None else own
        found = {*ends, self.eos, self._end_of_answers()} - {None}
        self.stops = frozenset(found or self._special)

    @property
    def needed_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            ValueError: There is none.
        """
        if self.template is None:
            raise ValueError(
                f"Messages require a chat template, which {self.folder} does not have. Use a folder with one, "
                "or `template` (--chat_template)."
            )
        return self.template

    @functools.cached_property
    def blank(self) -> int:
        """The least id that does not end an answer, for places that are still to be written."""
        return next(number for number in itertools.count() if number not in self.stops)

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, with added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = False) -> Encoded:
        """The tokens of a text.

        Args:
            text: The text; names of special tokens in it become these.
            special: Whether the tokens that the model expects around a text are added, such as a first one.
        """
        found = self._tokenizer.encode(text, add_special_tokens=special)
        return Encoded(list(found.ids), [tuple(span) for span in found.offsets])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, with special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token(self, number: int) -> str:
        """The token of an id, as it is in the vocabulary."""
        return self._tokenizer.id_to_token(number) or f"[{number}]"

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer and the template into a folder, such as that of an exported model."""
        new = Path(checks.path("folder", folder))
        for name in (_TOKENIZER, _CONFIG, _SPECIAL):
            if (self.folder / name).is_file() and new.resolve() != self.folder.resolve():
                shutil.copyfile(self.folder / name, new / name)
        if self.template is not None:
            (new / _TEMPLATE).write_text(self.template.source, encoding="utf-8")

    def _id(self, name: str | None) -> int | None:
        return None if name is None else self._tokenizer.token_to_id(name)

    def is_end(self, number: int) -> bool:
        """Whether a token can end a turn in training: also another special one, such as that of a tool call."""
        return number in self.stops or number in self._special

    def _named_ends(self) -> list[int]:
        for name in _WITH_IDS:
            ends = _read_json(self.folder / name).get("eos_token_id")
            found = ends if isinstance(ends, list) else [ends]
            if found := [end for end in found if isinstance(end, int)]:
                return found
        return []

    def _end_of_answers(self) -> int | None:
        """The special token after an answer in the template."""
        if self.template is None:
            return None
        messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER})
        try:
            text = self.template.render(messages, "messages")
        except ValueError:
            return None  # Such as a template that requires tools.
        begin = text.rfind(_ANSWER) + len(_ANSWER)
        encoded = self.encode(text)
        after = (n for n, (at, _) in zip(encoded.ids, encoded.spans, strict=True) if at >= begin)
        return next((number for number in after if number in self._special), None)


def _read_tokenizer(path: Path):
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "Chat data requires the package `tokenizers`, which is not installed. Run: pip install "
            "'tfdist[hub]'."
        ) from error
    if not path.is_file():
        raise ValueError(
            f"`folder` must have {_TOKENIZER}. Received: folder={checks.shown(str(path.parent))}."
        )
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The package has no error of its own.
        raise ValueError(
            f"{path} must be a file of the package `tokenizers`. Received: {error}."
        ) from error
    found.no_truncation()
    found.no_padding()
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON. Received: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object. Received: {type(found).__name__}.")
    return found


def _content(token: Any) -> str | None:
    """The text of a special token, which files have as text or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    """The source of the chat template of a folder; of several the default one."""
    if (folder / _TEMPLATE).is_file():
        return (folder / _TEMPLATE).read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None
