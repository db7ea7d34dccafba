"""`tfdist-finetune chat`: talk with a model in the terminal.

    tfdist-finetune chat tuned/
    echo "What is a shard?" | tfdist-finetune chat tuned/hf --temperature=0.7

A line of the input is a message; `/new` begins a new conversation.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from tfdist.launch.finetune.chat import read_tokenizer
from tfdist.launch.finetune.options import EXPORTS
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.flags.values import UsageError, input_file
from tfdist.utils.checks import one_line

_NEW = "/new"


@dataclasses.dataclass(frozen=True)
class TalkOptions:
    """The options of the program; see the flags of the same names."""

    seq_length: int = option(512, "Tokens of a conversation", least=2, most=1 << 20)
    temperature: float = option(
        0.0, "Randomness of answers; 0: the most probable tokens", least=0.0, most=100.0
    )
    system: str | None = option(None, "Message of the role system that begins each conversation")
    tokenizer: str | None = option(
        None, "Folder with tokenizer.json and a chat template [that of the model]"
    )
    chat_template: str | None = option(None, "File with the Jinja template of conversations")
    dtype_policy: str | None = option(None, "Dtype policy of the model [that of the folder]")
    seed: int = option(0, "Seed of the sampling", least=0, most=2**32 - 1)


_FLAGS = define_flags(TalkOptions)


def _check(words: list[str]) -> tuple[TalkOptions, Path]:
    options = _FLAGS.read()
    if len(words) != 1:
        raise UsageError(
            f"`chat` requires one folder. Received: {' '.join(words) or 'none'}. Run tfdist-finetune chat FOLDER."
        )
    if options.chat_template is not None:
        input_file("chat_template", options.chat_template)
    given = Path(words[0]).expanduser()
    # That of `--output` has a folder for each format, with the tokenizer.
    places = [*(given / kind for kind in EXPORTS), given]
    found = [place for place in places if (place / "config.json").is_file()]
    if not found:
        raise UsageError(
            f"A folder must have a model: config.json and weights. Received: {words[0]}. Export one with "
            "tfdist-finetune --export=hf."
        )
    return options, found[0]


def _main(checked: tuple[TalkOptions, Path]) -> None:
    given, folder = checked
    with quiet_start():
        import keras_hub

        import tfdist
    from tfdist.addons.hub.chat.answering import answer

    tokenizer = read_tokenizer(Path(given.tokenizer or folder).expanduser(), given.chat_template)
    if tokenizer.template is None:
        raise UsageError(f"{tokenizer.folder} must have a chat template. Use --chat_template=FILE.")
    options = {} if given.dtype_policy is None else {"dtype": given.dtype_policy}
    try:
        task: Any = tfdist.load_preset(folder, preprocessor=None, compile=False, **options)
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(f"{folder} cannot be used: {one_line(error)}") from error
    sampler = keras_hub.samplers.GreedySampler()
    if given.temperature:
        sampler = keras_hub.samplers.RandomSampler(seed=given.seed, temperature=given.temperature)
    task.compile(sampler=sampler)
    begin = [] if given.system is None else [{"role": "system", "content": given.system}]
    messages = list(begin)
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip() or line.strip() == _NEW:
            messages = list(begin) if line.strip() else messages
            continue
        messages.append({"role": "user", "content": line.strip()})
        try:
            text = answer(task, tokenizer, messages, length=given.seq_length)
        except ValueError as error:
            print(f"{error} A new conversation begins.", file=sys.stderr)
            messages = list(begin)
            continue
        print(text, flush=True)
        messages.append({"role": "assistant", "content": text})


TALK = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-finetune chat FOLDER [flags]",
    summary="Answers the messages of the input by a model of a folder.",
    check=_check,
    words=True,
)
