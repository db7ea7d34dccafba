"""What documents say and the code decides: floors, programs, codes, flags, places, versions, numbers."""

from __future__ import annotations

import configparser
import importlib.util
import re

import pytest

from tests.docs import tables
from tests.docs.blocks import ROOT, documents
from tests.values.command_lines import programs

PAGES = [*documents(), ROOT / "SECURITY.md"]
#: Flags in the documents that are not of tfdist's programs, by whose they are.
FLAGS_OF_OTHERS = {
    "the benchmarks": {"map", "only", "rounds", "steps", "table", "ways", "rate", "rows", "torch"},
    "unshare": {"net"},
    "sbatch": {"qos"},
    "XLA": {"tf_xla_auto_jit", "xla_force_host_platform_device_count"},
    "horovodrun": {"host"},
    "pytest": {"cross"},
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def inline_code() -> list[tuple[str, str]]:
    """The code in the running text of all documents: the document, and what stands between backticks."""
    found = []
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [(page.name, code) for code in re.findall(r"`([^`]+)`", prose)]
    return found


def test_all_programs_are_listed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].split("\n")
    names = {line.partition("=")[0].strip() for line in lines if line}
    missing = {name for name in names if name not in text_of("docs/launchers.md")}
    assert not missing, missing


def test_the_exit_codes_are_those_of_the_code():
    from tfdist.runtime import exit_codes

    codes = {
        getattr(exit_codes, name) for name in (name for name in vars(exit_codes) if name.isupper())
    }
    _, _, rest = text_of("docs/troubleshooting.md").partition("\n## Exit codes\n")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", rest.partition("\n## ")[0], re.M)}
    assert listed == codes | {0}


def test_flags_that_are_named_exist():
    known = {name for program in programs().values() for name in program.values}
    known |= {"help", "helpfull"}.union(*FLAGS_OF_OTHERS.values())
    wrong = {
        f"{page}: --{flag}"
        for page, code in inline_code()
        for flag in re.findall(r"(?<![\w-])--(?:no)?([a-z]\w*)(?![\w-])", code)
        if flag not in known and f"no{flag}" not in known
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_places_that_are_named_exist():
    """Files of the repository by their path from the root, or from `tfdist/`."""
    roots = {path.name for path in (*ROOT.iterdir(), *(ROOT / "tfdist").iterdir()) if path.is_dir()}
    wrong = {
        f"{page}: {code}"
        for page, code in inline_code()
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", code)
        and code.partition("/")[0] in roots - {"build", "data"}
        and not any((base / code).exists() for base in (ROOT, ROOT / "tfdist"))
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_modules_that_are_run_exist():
    wrong = set()
    for page in PAGES:
        for module in re.findall(r"-m ((?:tfdist|tests)(?:\.\w+)+)", page.read_text()):
            if importlib.util.find_spec(module) is None:
                wrong.add(f"{page.name}: {module}")
    assert not wrong, "\n".join(sorted(wrong))


def words(text: str) -> str:
    return " ".join(text.split())


def sentences() -> list[tuple[str, str]]:
    """A document, and what it says with a number that the code has."""
    from tfdist.addons.slow_links.compressor import Compressor
    from tfdist.checkpoint.directory_lock import _RENEW_SECONDS
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.gradients.throttle import MAX_IN_FLIGHT, MAX_IN_FLIGHT_SHARDED
    from tfdist.launch.run import restarts
    from tfdist.runtime.lock_owner import STALE_SECONDS
    from tfdist.runtime.versions import RANGES
    from tfdist.step.gradient_options import BUCKET_BYTES
    from tfdist.step.shares import MeasuredShares
    from tfdist.strategies.options import StrategyOptions

    def range_of(name: str) -> str:
        (major, first), (_, end) = RANGES[name]
        return f"{major}.{first} to {major}.{end - 1}"

    english = {2: "two", 4: "four", 10: "ten"}
    versions = f"TensorFlow {range_of('tensorflow')}, Keras {range_of('keras')}"
    mib, most = BUCKET_BYTES >> 20, P2PEngine.max_group_size
    start_step = Compressor.__init__.__kwdefaults__["start_step"]
    flight, sharded = english[MAX_IN_FLIGHT], english[MAX_IN_FLIGHT_SHARDED]
    return [
        ("README.md", versions),
        ("docs/index.md", versions),
        ("docs/performance.md", f"sets the size of a bucket, {mib} MiB by default"),
        ("docs/code_tour.md", f"buckets of {mib} MiB"),
        ("docs/code_tour.md", f"a socket to each rank in groups of up to {most}"),
        ("docs/code_tour.md", f"no more than {sharded} are in flight"),
        ("docs/performance.md", f"up to {most} ranks per host and {most} hosts"),
        (
            "docs/performance.md",
            f"Up to {flight} buckets of gradients are computed or in flight at a time ({sharded}",
        ),
        ("docs/memory.md", f"take {sharded} buckets more, in stage 0 {flight}"),
        (
            "tfdist/addons/slow_links/README.md",
            f"The first `start_step` steps ({start_step}) are not compressed",
        ),
        (
            "docs/troubleshooting.md",
            f"sets the time ({StrategyOptions.watchdog_seconds:g} by default",
        ),
        ("docs/checkpoints.md", f"a file that is renewed every {_RENEW_SECONDS:g} s"),
        ("docs/checkpoints.md", f"elsewhere after {STALE_SECONDS:g} s without renewal"),
        (
            "docs/checkpoints.md",
            f"After {english[int(restarts._HEALTHY_SECONDS // 60)]} minutes without a failure",
        ),
        ("docs/checkpoints.md", f"after {restarts._FIRST_DELAY:g} s, then 2, 4"),
        ("tfdist/addons/unequal_ranks/README.md", f"| `smoothing` | {MeasuredShares.smoothing} |"),
        (
            "tfdist/addons/unequal_ranks/README.md",
            f"| `hysteresis` | {MeasuredShares.hysteresis} |",
        ),
    ]


def test_numbers_are_those_of_the_code():
    wrong = [f"{page}: {said}" for page, said in sentences() if said not in words(text_of(page))]
    assert not wrong, "\n".join(wrong)


def test_names_that_look_like_secrets():
    """All that `tfdist-run` keeps from other hosts, and nothing else."""
    from tfdist.launch.run.remote import _SECRET

    listed = re.search(
        r"like secrets by their name \(with (.*?) in\s+it\)", text_of("docs/security.md"), re.S
    )
    assert listed is not None
    names = re.findall(r"`(\w+)`", listed[1])
    patterns = re.findall(r"[A-Z_?]{3,}", _SECRET.pattern)
    assert [name for name in names if _SECRET.fullmatch(f"A_{name}_B") is None] == []
    assert len(names) == len(patterns)


def test_the_picture_of_the_readme_has_the_ratios_of_the_table():
    """What is measured beside other libraries, and beside one process of tfdist's own."""
    _, _, rest = text_of("docs/performance.md").partition("<!-- benchmarks.training -->")
    rows = re.findall(
        r"^\| `([\w-]+)` *\| tfdist,.*? / .*?\| +[\d.]+ \| +[\d.]+ \| +\**([\d.]+)",
        rest.partition("<!-- end -->")[0],
        re.M,
    )
    others = [1 / float(ratio) for name, ratio in rows if not name.endswith("one-process")]
    own = {f"{1 / float(ratio):.2f}" for name, ratio in rows if name.endswith("one-process")}
    numbers = re.search(
        r"!\[tfdist runs ([\d.]+) to ([\d.]+) times .*?([\d.]+) times", text_of("README.md")
    )
    assert numbers is not None
    assert numbers.groups() == (f"{min(others):.2f}", f"{max(others):.2f}", *own)


@pytest.mark.parametrize(("document", "name"), tables.TABLES)
def test_tables_are_as_the_planner_computes_them(document, name):
    """`python -m tests.docs.tables` writes them anew."""
    assert tables.in_document(document, name) == tables.TABLES[document, name]()
