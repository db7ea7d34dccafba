"""Every code block of the documents is run: Python on real ranks, commands with small sizes.

A block is left out only by a comment right before it in the document, with a reason:
`<!-- not run: needs two hosts -->`. Programs of tfdist in such a block still check their flags.
"""

from __future__ import annotations

import ast
import math
import shlex

import pytest

from tests.conftest import every_case, pool_ids
from tests.docs import shell
from tests.docs.blocks import DATA, RUN, Block, blocks, commands, is_shell
from tests.docs.prelude import run_block, smaller

BLOCKS = blocks()
#: Pages of which others of `make test` train the same with tests of their own.
LONG = (
    *(f"docs/{name}.md" for name in ("experts", "pipeline", "semantics")),
    *(f"tfdist/addons/{name}/README.md" for name in ("recommenders", "slow_links")),
)
RUNNABLE = [block for block in BLOCKS if block.language in RUN and block.reason is None]


def ranks_of(block: Block) -> tuple[str, int]:
    """The engine whose strategy a block makes, and as many ranks as its largest mesh takes, or two."""
    ranks = 2
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Mesh":
            ranks = max(ranks, math.prod(map(_size_of, node.keywords)))
    return ("tensorflow" if "MultiWorkerStrategy" in block.text else "horovod"), ranks


def _size_of(word: ast.keyword) -> int:
    """The size of an axis, or of all that a dict names."""
    if isinstance(word.value, ast.Dict):
        return math.prod(ast.literal_eval(each) for each in word.value.values)
    return ast.literal_eval(word.value)


def scripts() -> list:
    found = []
    for block in RUNNABLE:
        if not is_shell(block):
            kind = ranks_of(block)
            # One kind of ranks is started for the quick ones; others take longer to start than to run.
            is_quick = kind == ("horovod", 2) and block.document not in LONG
            marks = [] if is_quick else [pytest.mark.slow]
            place = f"{pool_ids(kind)}-{block.place}"
            found.append(pytest.param(kind, block, id=place, marks=marks))
    return found


def distinct_commands() -> list:
    """Each command once, at the first place that has it."""
    found: dict[str, object] = {}
    for block in RUNNABLE:
        if is_shell(block):
            for words, printed in commands(block):
                line = shlex.join(words)
                marks = [pytest.mark.slow] if shell.plan(words).is_long else []
                param = pytest.param(words, printed, id=f"{block.place}-{line}"[:90], marks=marks)
                found.setdefault(line, param)
    return list(found.values())


def test_every_block_has_a_language_that_says_whether_it_is_run():
    wrong = [
        f"{block.place}: {block.language!r}"
        for block in BLOCKS
        if block.language not in (*RUN, *DATA)
    ]
    assert not wrong, wrong


def test_what_is_not_run_says_why():
    left_out = [block for block in BLOCKS if block.reason is not None]
    assert left_out
    wrong = [
        block.place
        for block in left_out
        if block.language not in RUN or not block.reason.startswith("needs ")
    ]
    assert not wrong, wrong


def test_commands_are_told_from_comments_quotations_and_output():
    source = "# What's run\nrun 'a\nb' \\\n  -c  # that's it\n\nrun d\n"
    block = Block("page.md", 1, "sh", source, None)
    assert commands(block) == [(["run", "a\nb", "-c"], []), (["run", "d"], [])]
    console = Block("page.md", 1, "console", "$ run a\nsaid\n...\n", None)
    assert commands(console) == [(["run", "a"], ["said", "..."])]
    with pytest.raises(ValueError, match="not closed"):
        commands(Block("page.md", 1, "sh", "run 'a\n", None))


@pytest.mark.timeout(240)
@every_case
@pytest.mark.parametrize(("pool", "block"), scripts(), indirect=["pool"])
def test_python(pool, block, tmp_path):
    path = tmp_path / "block.py"
    # As many lines before it as in the document, so that tracebacks name the place.
    path.write_text("\n" * block.line + smaller(block.text, tmp_path))
    try:
        pool.run(run_block, str(path), str(tmp_path), timeout=200)
    except Exception as error:
        error.add_note(f"--- {block.place}, as the ranks had it ---\n{path.read_text().strip()}")
        raise


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("words", "printed"), distinct_commands())
def test_commands(words, printed, tmp_path):
    if "horovodrun" in words:
        pytest.importorskip("horovod")
    out = shell.run(shell.plan(words), shell.sandbox(tmp_path), timeout=280).splitlines()
    if "..." in printed:
        printed = printed[: printed.index("...")]
        out = out[: len(printed)]
    if printed:
        assert [line.rstrip() for line in out] == printed


def test_flags_of_commands_that_are_not_run(tmp_path):
    folder = shell.sandbox(tmp_path)
    for block in BLOCKS:
        if is_shell(block) and block.reason is not None:
            for words, _ in commands(block):
                shell.check_flags(words, folder)


def test_flags_of_a_command_that_another_writes_down(tmp_path):
    """What `tfdist-launch` starts on a cluster."""
    folder = shell.sandbox(tmp_path)
    lines = [words for block in BLOCKS if is_shell(block) for words, _ in commands(block)]
    inner = [words[words.index("--") + 1 :] for words in lines if words[0] == "tfdist-launch"]
    assert inner
    for words in {tuple(words) for words in inner}:
        shell.check_flags(list(words), folder)


def test_a_wrong_flag_is_seen(tmp_path):
    words = ["tfdist-run", "-np", "2", "--", "tfdist-train"]
    shell.check_flags([*words], tmp_path)
    with pytest.raises(AssertionError, match="Unknown command line flag 'no_such_flag'"):
        shell.check_flags([*words, "--no_such_flag=1"], tmp_path)
