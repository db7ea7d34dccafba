"""`tfdist-doctor` finds what is broken in set-ups that are broken for it, and names the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import slow_but
from tests.launch.processes import BIN
from tfdist.launch.doctor import machine
from tfdist.launch.doctor.findings import note, ok, problem, run_checks
from tfdist.launch.doctor.page import print_page
from tfdist.launch.doctor.software import Trials

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

#: ssh as far as the launchers use it; the command runs here.
_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do
  if [ "$1" = "-G" ]; then echo "hostname $3"; exit 0; fi
  shift
done
shift 2
{before}
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$*"
"""


def doctor(*flags: str, environment=None, seconds=60, before=(), **options):
    """Runs the doctor without imports of TensorFlow, as a user would start it."""
    command = [*before, os.path.join(BIN, "tfdist-doctor"), *flags]
    cleared = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "HOROVOD_", "OMPI_", "TF_CONFIG"))
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**cleared, **(environment or {})},
        check=False,
        **options,
    )


@dataclasses.dataclass
class SetUp:
    """Something broken: flags and variables of the doctor, and what is in use while it runs."""

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    before: tuple[str, ...] = ()
    limit: Callable[[], None] | None = None
    held: list = dataclasses.field(default_factory=list)


def _program(folder: Path, name: str, text: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def _installed(folder: Path, name: str, version: str) -> dict[str, str]:
    """The installer's record of a package, found before the true one."""
    record = folder / f"{name}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def _other_horovod(tmp_path: Path) -> dict[str, str]:
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "metadata.json").write_text(json.dumps({"tensorflow": "2.16.1"}))
    return _installed(tmp_path / "site", "horovod", "0.28.1")


def no_compiler(tmp_path):
    # Horovod is to be built anew, and nothing is there to build it with.
    empty = tmp_path / "empty"
    empty.mkdir()
    return SetUp(environment={**_other_horovod(tmp_path), "PATH": str(empty), "CXX": ""})


def horovod_of_another_tensorflow(tmp_path):
    return SetUp(environment=_other_horovod(tmp_path))


def port_blocked(tmp_path):
    taken = socket.create_server(("0.0.0.0", 0))
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = {"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}
    return SetUp(environment={"TF_CONFIG": json.dumps(config)}, held=[taken])


def contradicting_tf_config(tmp_path):
    workers = ["127.0.0.1:23451", "127.0.0.1:23452"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}
    ranks = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    return SetUp(environment={"TF_CONFIG": json.dumps(config), **ranks})


def name_that_does_not_resolve(tmp_path):
    return SetUp(
        ("-H", "no-such-host.invalid:2"), _program(tmp_path, "ssh", _SSH.format(before=""))
    )


def too_old_keras(tmp_path):
    return SetUp(environment=_installed(tmp_path, "keras", "2.15.0"))


def no_memory(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    return SetUp(limit=limit)


def more_ranks_than_memory(tmp_path):
    return SetUp(("-np=1024",))


def clock_apart(tmp_path):
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    late = "import time\nreal = time.time\ntime.time = lambda: real() - 3600\n"
    (shifted / "sitecustomize.py").write_text(late)
    ssh = _SSH.format(before=f'export PYTHONPATH="{shifted}:$PYTHONPATH"')
    return SetUp(("-H", "127.0.0.2:2"), _program(tmp_path, "ssh", ssh))


def missing_ssh_key(tmp_path):
    # As OpenSSH has it.
    refuse = 'echo "root@127.0.0.2: Permission denied (publickey,password)." >&2; exit 255'
    return SetUp(("-H", "127.0.0.2:2"), _program(tmp_path, "ssh", _SSH.format(before=refuse)))


def read_only_work_folder(tmp_path):
    work = tmp_path / "work"
    work.mkdir(mode=0o555)
    if os.geteuid():
        return SetUp((f"--folder={work}",))
    # Root may write everywhere but on what is mounted otherwise.
    mount = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o ro tmpfs {work} && exec "$@"',
        "-",
    )
    if subprocess.run([*mount, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("Nothing can be mounted here.")
    return SetUp((f"--folder={work}",), before=mount)


BROKEN = {
    no_compiler: ("requires a C++ compiler", "apt install g++"),
    horovod_of_another_tensorflow: (
        "built for TensorFlow 2.16.1",
        "tfdist-install-horovod --force",
    ),
    port_blocked: ("is blocked: another program listens there", "use another port"),
    contradicting_tf_config: ("two launchers conflict", "unset TF_CONFIG"),
    name_that_does_not_resolve: ("does not resolve", "/etc/hosts"),
    too_old_keras: ("2.15.0, but tfdist requires >=3.", "pip install 'keras"),
    no_memory: ("a process may address 2.0 GiB", "ulimit -v unlimited"),
    more_ranks_than_memory: ("1024 rank(s) require 768.0 GiB", "-> -np"),
    clock_apart: ("its clock is 3,600 s behind", "timedatectl set-ntp true"),
    missing_ssh_key: ("no key of this user is authorized there", "ssh-copy-id 127.0.0.2"),
    read_only_work_folder: ("cannot be written", "mount it read-write"),
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_what_is_broken_is_found_with_its_remedy(make, tmp_path):
    broken = make(tmp_path)
    begin = time.monotonic()
    done = doctor(
        "--noimports",
        *broken.flags,
        environment=broken.environment,
        before=broken.before,
        preexec_fn=broken.limit,
    )
    seconds = time.monotonic() - begin
    for each in broken.held:
        each.close()
    said = " ".join(done.stdout.split())
    found, remedy = BROKEN[make]
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    assert "PROBLEM" in said and found in said and remedy in said, done.stdout
    assert seconds < 20


def test_a_machine_that_is_fine_has_no_problem(tmp_path):
    done = doctor(
        "--noimports",
        "-H",
        "127.0.0.2:1",
        environment=_program(tmp_path, "ssh", _SSH.format(before="")),
    )
    assert done.returncode == 0, done.stdout
    assert "No problem was found" in done.stdout
    assert "clocks agree" in done.stdout and "can connect to this machine" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 or str(tmp_path) in done.stdout


def test_a_name_that_only_ssh_knows(tmp_path):
    """A Host of ~/.ssh/config, which the name server does not have."""
    ssh = _SSH.format(before="").replace("hostname $3", "hostname 127.0.0.2")
    environment = _program(tmp_path, "ssh", ssh)
    done = doctor("--noimports", "-H", "alias.invalid:1", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepts connections from here" in done.stdout


def test_what_gradients_ask_of_a_link():
    from tfdist.launch.doctor.hosts import Job

    # 1e9 parameters are 4e9 bytes; 2 x 3/4 of them in half a second.
    asks = Job(parameters=1e9, step_seconds=0.5, ranks=4).asks(bandwidth=3e9, latency=1e-6)
    assert asks.bandwidth == 12e9 and asks.compression == 4.0 and asks.accumulation == 4
    # 954 buckets of 4 MiB, 6 hops each, in a tenth of the step.
    assert asks.latency == pytest.approx(0.05 / (954 * 6)) and not asks.is_met
    assert Job(1e6, 0.5, 4).asks(3e9, 1e-6).is_met


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parameters=1e6", "--step_seconds=10"], "gradients require 1 MB/s"),
        (["--parameters=1e12", "--step_seconds=0.01"], "-> the bandwidth is too low: accumulate"),
    ],
)
def test_a_link_is_compared_with_a_job(tmp_path, flags, said):
    done = doctor(
        "--noimports",
        "-H",
        "127.0.0.2:2",
        *flags,
        environment=_program(tmp_path, "ssh", _SSH.format(before="")),
    )
    assert said in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parameters=1e6"], "--parameters and --step_seconds must be given together"),
        (["--parameters=1e6", "--step_seconds=1"], "requires other hosts"),
    ],
)
def test_a_job_without_a_link_is_refused(flags, said):
    done = doctor("--noimports", *flags)
    assert done.returncode == 2 and said in done.stderr


def test_what_hangs_is_reported_and_does_not_hold_up_the_page(tmp_path):
    for name in ("ssh", "nvidia-smi"):
        environment = _program(tmp_path / "bin", name, "#!/bin/sh\nsleep 300\n")
    done = doctor(
        "--noimports", "--seconds=8", "-H", "127.0.0.2:1", environment=environment, seconds=60
    )
    assert done.returncode == 1
    assert "nvidia-smi did not end" in " ".join(done.stdout.split())
    assert "127.0.0.2" in done.stdout


def test_a_check_that_never_answers_is_one_that_is_reported():
    def never():
        time.sleep(60)
        return []

    def breaks():
        raise RuntimeError("broken driver")

    begin = time.monotonic()
    (section,) = run_checks({"All": [("disk", never), ("driver", breaks)]}, 0.5)
    assert time.monotonic() - begin < 5
    hung, failed = section.findings
    assert "no answer within 0.5 s" in hung.text and hung.remedy
    assert "RuntimeError: broken driver" in failed.text and failed.remedy


def test_memory_of_a_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text(str(3 << 20))
    (tmp_path / "memory.current").write_text(str(1 << 20))
    assert machine.available_bytes(tmp_path) == (2 << 20, " in this container")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path)[1] == ""


def test_the_page_has_colours_on_terminals_alone(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    sections = run_checks({"All": [("one", lambda: [ok("a", "b"), note("c", "d", "e")])]}, 5)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain, coloured, without = io.StringIO(), Terminal(), Terminal()
    print_page(sections, plain)
    print_page(sections, coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    print_page(sections, without)
    assert "\x1b" in coloured.getvalue() and without.getvalue() == plain.getvalue()
    assert "\x1b" not in plain.getvalue()
    hostile = run_checks({"All": [("one", lambda: [problem("h", "a\x1b[2Jb", "c")])]}, 5)
    shown = io.StringIO()
    print_page(hostile, shown)
    assert "\x1b" not in shown.getvalue()


@pytest.mark.parametrize(
    ("has_onednn", "gpus", "variable", "processor", "is_told"),
    [
        (False, [], None, "x86_64", True),
        (True, [], None, "x86_64", False),
        (None, [], None, "x86_64", False),
        (False, ["a GPU"], None, "x86_64", False),
        (False, [], "0", "x86_64", False),
        (False, [], None, "aarch64", False),
    ],
)
def test_when_onednn_is_missed(has_onednn, gpus, variable, processor, is_told, monkeypatch):
    class Found(Trials):
        def __init__(self):
            self.has_onednn = has_onednn

        def gpus(self):
            return gpus

    Found.has_onednn = None
    monkeypatch.delenv(ONEDNN, raising=False)
    if variable is not None:
        monkeypatch.setenv(ONEDNN, variable)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    found = machine.kernels(Found())
    assert [f"export {ONEDNN}=1" in finding.remedy for finding in found] == [True] * is_told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("value", slow_but(["0"], ["0", "1", None]))
def test_a_tensorflow_without_onednn_is_told(value, monkeypatch):
    if value is None:
        monkeypatch.delenv(ONEDNN, raising=False)
    else:
        monkeypatch.setenv(ONEDNN, value)
    # As docs/memory.md advises; it does not switch oneDNN off.
    monkeypatch.setenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    trials = Trials(100)
    if value is not None:
        assert trials.has_onednn is (value == "1")
    found = machine.kernels(trials)
    # Who sets the variable knows of it.
    is_told = value is None and not trials.has_onednn and platform.machine() == "x86_64"
    assert [ONEDNN in finding.remedy for finding in found] == [True] * is_told


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_horovod_that_ends_the_process_is_found(tmp_path):
    environment = _other_horovod(tmp_path)
    engine = tmp_path / "site" / "horovod" / "tensorflow.py"
    engine.write_text("import os\nos.abort()\n")
    done = doctor(environment=environment, seconds=150)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "it was killed by SIGABRT" in said and "TensorFlow engine works" in said, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_of_each_engine_meet():
    done = doctor("--engines", "--seconds=100", seconds=280)
    assert done.returncode == 0, done.stdout
    assert "two ranks ran an all-reduce" in done.stdout
    assert sys.executable in done.stdout


def test_the_limit_of_attention_is_that_of_the_layers():
    from tfdist.context_parallel.blockwise import attention

    assert f"up to {attention._WHOLE_BYTES >> 30} GiB" in machine._ATTENTION
