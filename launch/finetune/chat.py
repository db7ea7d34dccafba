"""The options of `tfdist-finetune` for chat data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.launch.flags.options import names, option, refuse_ignored
from tfdist.launch.flags.values import UsageError, data_file, input_file

CHAT = "chat:"


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """The options of conversations; see the flags of the same names."""

    validation: str | None = option(
        None, "chat:FILE for validation; otherwise the last tenth of the conversations"
    )
    tokenizer: str | None = option(
        None, "Folder with tokenizer.json and a chat template [that of --preset]"
    )
    chat_template: str | None = option(None, "File with the Jinja template of conversations")
    packing: bool = option(False, "Several conversations per row, which do not see each other")
    truncation: str = option(
        "keep_start",
        "The part of a conversation of more than --seq_length tokens that is kept",
        choices=("keep_start", "keep_end"),
    )
    loss_average: str = option(
        "update",
        "Divide the loss by the trained tokens of an update, or of each batch that it accumulates",
        choices=("update", "batch"),
    )
    show: int = option(
        0, "Conversations whose tokens are shown, with a mark of trained ones", least=0
    )
    sample_every: int = option(
        0, "Epochs between answers to --prompt during training; 0: none", least=0
    )

    def check(self, dataset: str) -> None:
        """Check the options before the rendezvous of the ranks.

        Args:
            dataset: The value of `--dataset`.

        Raises:
            UsageError: A file does not exist, or options require chat data.
        """
        if not dataset.startswith(CHAT):
            refuse_ignored(
                self, names(self), "requires --dataset=chat:FILE", f"--dataset={dataset}"
            )
            return
        data_file("dataset", dataset.removeprefix(CHAT), CHAT)
        if self.validation is not None:
            if not self.validation.startswith(CHAT):
                raise UsageError(
                    f"--validation must be chat:FILE. Received: --validation={self.validation}."
                )
            data_file("validation", self.validation.removeprefix(CHAT), CHAT)
        if self.chat_template is not None:
            input_file("chat_template", self.chat_template)

    def read_tokenizer(self, preset: str) -> Any:
        """The tokenizer, with the chat template.

        Args:
            preset: The folder of the model.

        Raises:
            UsageError: A file is missing or broken.
        """
        return read_tokenizer(Path(self.tokenizer or preset).expanduser(), self.chat_template)

    def read(self, dataset: str, tokenizer: Any, count: int, length: int) -> tuple[list, list]:
        """The token rows of each line, for training and for validation.

        Args:
            dataset: The value of `--dataset`.
            tokenizer: The tokenizer.
            count: The answers of a line.
            length: The tokens of a row.

        Raises:
            UsageError: A file cannot be used.
        """
        from tfdist.addons.hub.chat.data import held_out, read_answers

        def lines(source: str) -> list:
            path = Path(source.removeprefix(CHAT)).expanduser()
            return read_answers(path, tokenizer, count, length=length, truncation=self.truncation)

        try:
            found = lines(dataset)
            return held_out(found) if self.validation is None else (found, lines(self.validation))
        except (OSError, ValueError) as error:
            raise UsageError(f"--dataset={dataset} cannot be used: {error}") from error


def read_tokenizer(folder: Path, chat_template: str | None) -> Any:
    """The tokenizer of a folder.

    Args:
        folder: The folder.
        chat_template: A file with a chat template, in place of that of the folder; None for that.

    Raises:
        UsageError: A file is missing or broken.
    """
    from tfdist.addons.hub.chat.tokenizer import ChatTokenizer

    template = None
    try:
        if chat_template is not None:
            template = Path(chat_template).expanduser().read_text("utf-8")
        return ChatTokenizer(folder, template)
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(f"The tokenizer of {folder} cannot be read: {error}") from error


def check_tokens(rows: Sequence, task: Any) -> None:
    """Check that the model has the tokens of all conversations.

    Raises:
        UsageError: It does not.
    """
    if not rows:
        return
    from tfdist.addons.hub.chat.rows import check_vocabulary

    try:
        for _ in check_vocabulary(rows, task.backbone.vocabulary_size):
            pass
    except ValueError as error:
        raise UsageError(str(error)) from error
