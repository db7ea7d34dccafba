"""What tfdist-install-horovod asks for, keeps, hands to the compiler, and says."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from tfdist.launch.install_horovod import build as horovod_build
from tfdist.launch.install_horovod import cuda_packages
from tfdist.launch.install_horovod import prerequisites as horovod_prerequisites
from tfdist.launch.install_horovod.digests import write_digest
from tfdist.launch.install_horovod.prerequisites import BuildOptions, PrerequisiteError

MPI = BuildOptions(mpi=True)
NCCL = BuildOptions(gpu_operations="nccl")
OPTIONS = [BuildOptions(), MPI, NCCL]
TENSORFLOW = ("tensorflow", "2.21.0")

MODULE = ["-m", "tfdist.launch.install_horovod.main"]
RUN = "from tfdist.launch.install_horovod import main as install_horovod; import sys; {}; install_horovod.run()"


def install(*arguments, path=None, python=sys.executable, **environment):
    """Runs the program as its users do."""
    environment = {**os.environ, **environment}
    for name in ("CXX", "HOROVOD_CMAKE"):
        if environment.get(name) == os.environ.get(name):
            environment.pop(name, None)
    if path is not None:
        environment["PATH"] = str(path)
    command = [python, *(arguments if arguments[:1] == ("-c",) else [*MODULE, *arguments])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tools(tmp_path):
    """A PATH of one folder, and a function that puts programs there which only say a line."""
    if shutil.which("cmake", path=sysconfig.get_path("scripts")):
        pytest.skip("CMake is among this interpreter's scripts, where it is always found.")
    folder = tmp_path / "bin"
    folder.mkdir()

    def add(*names, line="cmake version 3.25.1"):
        for name in names:
            (folder / name).write_text(f"#!/bin/sh\necho {line}\n")
            (folder / name).chmod(0o755)
        return folder

    return add


def assert_one_line(finished, *words, code=2):
    assert finished.returncode == code, finished.stderr
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stderr.startswith("tfdist-install-horovod: ")
    for word in words:
        assert word in finished.stderr


# What is missing is said before anything is built, in one line, with code 2.


@pytest.mark.parametrize(
    ("present", "flags", "words"),
    [
        ([], [], ["requires a C++ compiler", "apt install g++"]),
        (["c++"], [], ["CMake", "pip install cmake"]),
        (["clang++"], [], ["CMake", "pip install cmake"]),
        (["c++", "cmake"], [], ["make, which was not found", "apt install make"]),
        (["c++", "cmake", "make"], ["--mpi"], ["--mpi", "mpicxx", "libopenmpi-dev"]),
        (["c++", "cmake", "make"], ["--gpu_operations=nccl"], ["nvcc", "HOROVOD_CUDA_HOME=/none"]),
    ],
    ids=["compiler", "cmake", "cmake-with-clang", "make", "mpi", "cuda"],
)
def test_each_missing_program_is_named(tmp_path, tools, present, flags, words):
    finished = install(
        f"--cache_dir={tmp_path}/cache", *flags, path=tools(*present), HOROVOD_CUDA_HOME="/none"
    )
    assert_one_line(finished, *words)
    assert not (tmp_path / "cache").exists()


def test_a_compiler_named_in_cxx_has_to_exist(tmp_path, tools):
    cache = f"--cache_dir={tmp_path}/cache"
    path = tools("c++", "icpx")
    assert_one_line(
        install(cache, path=path, CXX="gone++ -v"), "CXX=gone++ -v", "correct or unset it"
    )
    assert_one_line(install(cache, path=path, CXX="icpx -v"), "CMake")


def test_an_old_cmake_is_refused(tmp_path, tools):
    tools("c++", "make")
    path = tools("cmake", line="cmake version 3.10.2")
    finished = install(f"--cache_dir={tmp_path}", path=path)
    assert_one_line(finished, "requires CMake 3.13", "Received: 3.10", str(path))


def test_two_packages_of_nccl_are_refused(monkeypatch):
    monkeypatch.setattr(cuda_packages, "installed_version", lambda name: "2.30.1")
    with pytest.raises(PrerequisiteError, match=r"cannot be installed together.*pip uninstall"):
        cuda_packages.check_packages()


def test_the_variables_of_a_build_without_a_toolkit(tmp_path, monkeypatch):
    nccl, home = tmp_path / "site" / "nccl", tmp_path / "cuda" / "nvidia" / "cu13"
    for file in (
        nccl / "lib" / "libnccl.so.2",
        home / "lib" / "libcudart.so.13",
        nccl / "include" / "nccl.h",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(cuda_packages, "find_nccl", lambda: nccl)
    found = cuda_packages.build_variables(tmp_path / "cuda", {})
    assert found["HOROVOD_CUDA_HOME"] == str(home)
    assert found["CUDACXX"] == f"{home}/bin/nvcc"
    assert (home / "lib64" / "libcudart.so").exists()
    assert found["HOROVOD_NCCL_LINK"] == "SHARED"
    assert (Path(found["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").exists()
    assert (Path(found["HOROVOD_NCCL_HOME"]) / "include" / "nccl.h").exists()
    assert "90" in found["HOROVOD_BUILD_CUDA_CC_LIST"].split(",")
    own = {
        "HOROVOD_CUDA_HOME": "/cuda",
        "HOROVOD_NCCL_LIB": "/l",
        "HOROVOD_BUILD_CUDA_CC_LIST": "80",
    }
    assert cuda_packages.build_variables(tmp_path, own) == {"HOROVOD_NCCL_LINK": "SHARED"}


def test_a_wheel_with_nccl_is_cached_by_what_it_was_built_from(monkeypatch):
    tensorflow = ("tensorflow", "2.21.0")
    keys = {horovod_build.cache_key(NCCL, tensorflow)}
    monkeypatch.setattr(cuda_packages, "installed_version", lambda name: "2.99.1")
    keys.add(horovod_build.cache_key(NCCL, tensorflow))
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    keys.add(horovod_build.cache_key(NCCL, tensorflow))
    monkeypatch.setenv("HOROVOD_CUDA_HOME", "/usr/local/cuda")
    keys.add(horovod_build.cache_key(NCCL, tensorflow))
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("sys.platform = 'win32'", ["Linux or macOS", "Received: win32"]),
        ("import tfdist.testing; sys.path.clear()", ["TensorFlow is not installed"]),
    ],
    ids=["platform", "tensorflow"],
)
def test_an_interpreter_that_cannot_have_horovod(statement, words):
    assert_one_line(install("-c", RUN.format(statement)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu_operations=cuda"], ["--gpu_operations=cuda", "<none|nccl>"]),
        (["--forse"], ["'forse'", "force"]),
        (["horovod"], ["Received: horovod"]),
        (["--check", "--force"], ["--force cannot be combined with --check"]),
        (["--force", "--cache_dir=/proc/none"], ["--cache_dir", "/proc/none"]),
    ],
    ids=["enum", "unknown", "positional", "contradiction", "cache"],
)
def test_wrong_flags(tools, arguments, words):
    assert_one_line(install(*arguments, path=tools("c++", "cmake", "make")), *words)


def test_help_fits_a_screen():
    finished = install("--help")
    lines = finished.stdout.splitlines()
    assert finished.returncode == 0
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    for flag in ("--check", "--force", "--cache_dir", "--mpi", "--gpu_operations"):
        assert flag in finished.stdout
    assert "untested" in finished.stdout


# A wheel is kept for what it was built for, and for nothing else.


def test_the_cache_tells_apart_all_that_a_wheel_depends_on(monkeypatch):
    keys = [horovod_build.cache_key(options, TENSORFLOW) for options in OPTIONS]
    keys.append(horovod_build.cache_key(BuildOptions(), ("tensorflow", "2.21.1")))
    keys.append(horovod_build.cache_key(BuildOptions(), ("tensorflow-cpu", "2.21.0")))
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-other")
    keys.append(horovod_build.cache_key(BuildOptions(), TENSORFLOW))
    monkeypatch.setattr(horovod_build, "HOROVOD_VERSION", "0.28.2")
    keys.append(horovod_build.cache_key(BuildOptions(), TENSORFLOW))
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    keys.append(horovod_build.cache_key(BuildOptions(), TENSORFLOW))
    assert len(set(keys)) == len(keys)
    assert not any("/" in key or " " in key for key in keys)


def test_a_kept_wheel_needs_no_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    key = horovod_build.cache_key(BuildOptions(), horovod_prerequisites.check_interpreter())
    wheel = tmp_path / key / f"horovod-{horovod_build.HOROVOD_VERSION}-cp311-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    write_digest(wheel)
    (wheel.parent / "build.log").touch()
    assert horovod_build.build(BuildOptions(), tmp_path) == wheel
    assert str(wheel) in capsys.readouterr().out
    with pytest.raises(PrerequisiteError, match="compiler"):
        horovod_build.build(BuildOptions(), tmp_path, force=True)
    with pytest.raises(PrerequisiteError, match="compiler"):
        horovod_build.build(MPI, tmp_path)


def test_a_folder_without_a_wheel_of_this_version_has_none(tmp_path):
    assert horovod_build.find_wheel(tmp_path / "gone") is None
    (tmp_path / "horovod-0.27.0-cp311-none-any.whl").touch()
    (tmp_path / "build.log").touch()
    assert horovod_build.find_wheel(tmp_path) is None


def test_a_step_that_fails_shows_the_end_of_its_log_and_exits_with_1(tmp_path):
    key = horovod_build.cache_key(BuildOptions(), horovod_prerequisites.check_interpreter())
    wheel = tmp_path / key / f"horovod-{horovod_build.HOROVOD_VERSION}-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_text("no wheel")
    write_digest(wheel)
    finished = install(f"--cache_dir={tmp_path}", TMPDIR=str(tmp_path))
    assert finished.returncode == 1
    lines = finished.stderr.splitlines()
    assert len(lines) <= 31
    assert "invalid" in finished.stderr
    assert lines[-1].startswith("`pip install` failed")
    assert Path(lines[-1].split()[-1]).exists()


def test_only_the_last_30_lines_of_a_log_are_shown(tmp_path):
    log = tmp_path / "build.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    with pytest.raises(horovod_build.BuildError) as error:
        horovod_build._pip("no-such-command", log=log)
    shown = str(error.value).splitlines()
    assert len(shown) == 31
    assert "line 99" in shown
    assert "line 0" not in shown
    assert str(log) in shown[-1]


def test_the_compilers_words_are_shown_not_the_calls_that_led_to_it(tmp_path):
    log = tmp_path / "build.log"
    log.write_text(
        f"c++ {'-I/include ' * 100}\n"
        "mpi_ops.cc:1: error: no such thing\n"
        "Traceback (most recent call last):\n"
        + "  File setup.py\n" * 40
        + "subprocess.CalledProcessError: cmake\n"
    )
    with pytest.raises(horovod_build.BuildError) as error:
        horovod_build._pip("no-such-command", log=log)
    call, said, conclusion = str(error.value).splitlines()
    assert call.startswith("c++ -I/include")
    assert len(call) < 200
    assert said == "mpi_ops.cc:1: error: no such thing"
    assert conclusion.startswith("`pip")


# What the build is handed.


@pytest.mark.parametrize("options", [BuildOptions(), MPI], ids=["gloo", "mpi"])
def test_the_headers_of_a_cpu_build_are_empty(tmp_path, options):
    horovod_build.write_headers(tmp_path, options)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.h")}
    compiler = "tensorflow/compiler"
    assert files == {
        f"{compiler}/tf2xla/xla_op_kernel.h",
        f"{compiler}/tf2xla/xla_op_registry.h",
        f"{compiler}/xla/client/xla_builder.h",
        f"{compiler}/xla/service/custom_call_target_registry.h",
        f"{compiler}/xla/service/hlo.pb.h",
        f"{compiler}/xla/shape.h",
        f"{compiler}/xla/xla_data.pb.h",
    }
    assert all((tmp_path / name).read_text() == "" for name in files)


def test_the_first_header_of_a_gpu_build_hides_the_gpu(tmp_path):
    horovod_build.write_headers(tmp_path, NCCL)
    first, *others = horovod_build._XLA_HEADERS
    assert first.endswith("tf2xla/xla_op_kernel.h")
    undefined = (tmp_path / first).read_text().splitlines()
    assert undefined == ["#undef HAVE_GPU", "#undef HAVE_CUDA", "#undef HAVE_ROCM"]
    assert all((tmp_path / name).read_text() == "" for name in others)
    assert "AsGpuStreamValue" in (tmp_path / horovod_build._STREAM_HEADER).read_text()


def test_the_variables_of_the_build():
    given = {
        "PATH": "/usr/bin",
        "CXXFLAGS": "-O1",
        "MAKEFLAGS": "-j --jobserver-auth=3,4",
        "CCL_ROOT": "/opt/ccl",
        "HOROVOD_NCCL_HOME": "/opt/nccl",
        "HOROVOD_GPU_ALLREDUCE": "MPI",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
    }
    result = horovod_build.build_environment(Path("/headers"), BuildOptions(), given)
    assert result["CXXFLAGS"] == "-I/headers -O1"
    assert result["MAKEFLAGS"] == f"-j{os.cpu_count()}"
    assert result["PATH"] == f"/usr/bin:{sysconfig.get_path('scripts')}"
    assert "CCL_ROOT" not in result
    assert {name: value for name, value in result.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_NCCL_HOME": "/opt/nccl",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
    }


def test_options_choose_mpi_and_nccl():
    mpi = horovod_build.build_environment(Path("/headers"), MPI, {})
    assert mpi["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in mpi
    assert "HOROVOD_GPU_OPERATIONS" not in mpi
    nccl = horovod_build.build_environment(Path("/headers"), NCCL, {})
    assert nccl["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert nccl["HOROVOD_WITHOUT_MPI"] == "1"
    with pytest.raises(ValueError, match="Received: 'rocm'"):
        BuildOptions(gpu_operations="rocm")


def test_the_build_asks_for_what_the_extra_of_the_package_lists():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[3] / "setup.cfg")
    extra = config["options.extras_require"]["horovod-build"].split()
    assert extra == list(horovod_build.BUILD_REQUIREMENTS)


def own_environment(folder: Path) -> tuple[str, Path]:
    """The interpreter of an environment that sees the packages of this one, and the folder of its packages."""
    venv.create(folder / "env", with_pip=True, symlinks=True)
    packages = next((folder / "env" / "lib").glob("*/site-packages"))
    (packages / "these.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return str(folder / "env" / "bin" / "python"), packages


DECOY = "typedef int ncclResult_t; int ncclGetVersion(int* version) { *version = 1; return 0; }"
#: Runs a sum of two ranks, and asks whose NCCL the process has after Horovod was imported.
NCCL_PROOF = """
import ctypes, sys
from tfdist.collectives.horovod import import_horovod
from tfdist.runtime.horovod_variables import has_nccl
horovod = import_horovod()
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line}
print(bool(horovod.nccl_built()), has_nccl(), version.value, len(maps), "nvidia/nccl/lib" in maps.pop())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_with_nccl_needs_no_toolkit(tmp_path):
    """In an environment of its own that sees the packages of this one."""
    try:
        horovod_prerequisites.check_toolchain(BuildOptions())
    except PrerequisiteError as error:
        pytest.skip(str(error))
    python, _ = own_environment(tmp_path)
    flags = ("--gpu_operations=nccl", f"--cache_dir={tmp_path}/wheels")
    start = time.monotonic()
    built = install(*flags, python=python)
    if "No matching distribution" in built.stderr:
        pytest.skip("PyPI cannot be reached.")
    assert built.returncode == 0, built.stderr
    assert "Built with gloo, nccl" in built.stdout
    assert time.monotonic() - start < 360
    # Another library of that name, earlier in the search path.
    decoy = tmp_path / "libnccl.so.2"
    compiler = ["cc", "-shared", "-x", "c", "-o", str(decoy), "-"]
    subprocess.run(compiler, input=DECOY, text=True, check=True, timeout=60)
    proof = install("-c", NCCL_PROOF, python=python, LD_LIBRARY_PATH=str(tmp_path))
    assert proof.returncode == 0, proof.stderr
    *built_in, version, libraries, is_of_tensorflow = proof.stdout.split()
    assert built_in == ["True", "True"]
    assert int(version) > 22_000
    assert (libraries, is_of_tensorflow) == ("1", "True")
    assert "was built before" in install(*flags, python=python).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_from_nothing_and_one_from_the_cache(tmp_path):
    """In an environment of its own that sees the packages of this one."""
    try:
        horovod_prerequisites.check_toolchain(BuildOptions())
    except PrerequisiteError as error:
        pytest.skip(str(error))
    python, packages = own_environment(tmp_path)
    built = install(f"--cache_dir={tmp_path}/the cache", python=python)
    if "No matching distribution" in built.stderr:
        pytest.skip("PyPI cannot be reached.")
    assert built.returncode == 0, built.stderr
    begins = [
        "Building Horovod",
        "Built ",
        "Installed it",
        "The compiled library",
        "Tested: 2 ranks",
    ]
    said = built.stdout.splitlines()
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=True)] == begins
    assert "Built with gloo" in said[-1]
    assert (packages / "horovod").is_dir()

    start = time.monotonic()
    again = install(f"--cache_dir={tmp_path}/the cache", python=python)
    assert again.returncode == 0, again.stderr
    assert "was built before" in again.stdout
    assert "Built with gloo" in again.stdout
    assert time.monotonic() - start < 90
