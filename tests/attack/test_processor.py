"""Processors that do not do what they announce: real processes on top of faults that are preloaded or compiled in.

Every one has to end in the right text, computed another way, and a warning that says so; or, where the settings pin
what does not work, in one line that says what.
"""

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from omnidraft.demo.local_cluster import LocalCluster, ServiceFailed
from omnidraft.models.native.build import VARIANTS, is_announced
from omnidraft.models.probe.choice import ISA_VARIABLE
from omnidraft.models.probe.subprocess_trial import Outcome, run_once
from tests.homes import make_home

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.timeout(300)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="faults are compiled with g++")


FORWARD = "void omnidraft_forward(const Model* m, const Pass* p, double* spent_s) {"
START = "int omnidraft_start() { return allow_instructions(); }"
REFUSED = (
    START,
    '#include <unistd.h>\nint omnidraft_start() { return access("refused", F_OK) && allow_instructions(); }',
)
"""The system refuses the instructions as long as the working folder has this file."""
ILLEGAL = (FORWARD, f"{FORWARD} __builtin_trap();")
WRONG = ('#include "forward.h"', '#include <cmath>\n#define sqrt cbrt\n#include "forward.h"')
ANNOUNCED = [name for name in VARIANTS if is_announced(name)]
PROCESSOR = Path("/proc/cpuinfo").read_text().split()
WITHOUT_KERNELS = {"OMNIDRAFT_MODELS__KERNELS": "torch"}
needs_onednn = pytest.mark.skipif(
    "avx512bw" not in PROCESSOR, reason="torch gives bfloat16 to oneDNN on processors with AVX512"
)


def generate(models: tuple[Path, Path], home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`omnidraft generate` over the tiny pair in a process of its own; what it remembers is in `home`."""
    target, drafter = map(str, models)
    asked = ["--target", target, "--drafter", drafter, "--prompt", "a b c", "--raw", "--max-new-tokens", "8"]
    settings = {"OMNIDRAFT_HOME": str(home), "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "omnidraft.cli", "generate", *asked],
        env={name: value for name, value in os.environ.items() if name != ISA_VARIABLE} | settings | environ,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )


def preload(source: str, folder: Path) -> str:
    library = folder / f"{source}.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / f"{source}.c"), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


def faulty_compiler(folder: Path, faults: Mapping[str, tuple[str, str]]) -> str:
    """A C++ compiler that for some variants of the kernels replaces a piece of the source first."""
    replaced = {VARIANTS[name]: fault for name, fault in faults.items()}
    script = folder / "faulty-g++"
    script.write_text(f"""#!{sys.executable}
import pathlib, subprocess, sys
*arguments, last = sys.argv[1:]
flags = tuple(each for each in arguments if each.startswith("-m"))
if flags in {replaced!r}:
    sound, fault = {replaced!r}[flags]
    source = pathlib.Path(last)
    assert sound in source.read_text()
    arguments += ["-I", str(source.parent)]
    last = {str(folder / "planted.cpp")!r}
    pathlib.Path(last).write_text(source.read_text().replace(sound, fault))
sys.exit(subprocess.call(["g++", *arguments, last]))
""")
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def sound_text(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the tiny target says where nothing is wrong, in every precision of 16 bits or more."""
    home = make_home(tmp_path_factory.mktemp("sound"))
    return generate(tiny_models, home, OMNIDRAFT_MODELS__PRECISION="float32", **WITHOUT_KERNELS).stdout


@needs_compiler
@needs_onednn
@pytest.mark.long
def test_products_that_trap_unless_onednn_is_limited(tiny_models, tmp_path: Path, sound_text) -> None:
    trapping = {"LD_PRELOAD": preload("illegal_products", tmp_path), "SURVIVES": "AVX2", **WITHOUT_KERNELS}
    done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="bfloat16", **trapping)
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert "with AVX512_CORE_BF16: dies of SIGILL" in done.stderr
    assert "here oneDNN is kept to AVX2" in done.stderr


@needs_compiler
@needs_onednn
@pytest.mark.long
def test_products_that_trap_with_the_instructions_that_an_operator_pinned(tiny_models, tmp_path, sound_text) -> None:
    """A pinned format is refused; what is automatic is computed in another way."""
    trapping = {"LD_PRELOAD": preload("illegal_products", tmp_path), "SURVIVES": "AVX2", **WITHOUT_KERNELS}
    pinned = trapping | {ISA_VARIABLE: "AVX512_CORE_BF16"}
    refused = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="bfloat16", **pinned)
    assert refused.returncode == 2
    assert "torch cannot multiply matrices in bfloat16 on this processor: dies of SIGILL" in refused.stderr
    done = generate(tiny_models, tmp_path, **pinned)
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert "torch's matrix products on this processor: dies of SIGILL" in done.stderr


@needs_compiler
@pytest.mark.long
def test_kernels_with_an_illegal_instruction_and_kernels_with_wrong_numbers(tiny_models, tmp_path, sound_text) -> None:
    first, *others = ANNOUNCED
    broken = {"CXX": faulty_compiler(tmp_path, {first: ILLEGAL} | dict.fromkeys(others, WRONG))}
    done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="float32", **broken)
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert f"compiled for {first}: dies of SIGILL" in done.stderr
    assert all(f"compiled for {name}: float32 is off by" in done.stderr for name in others)
    assert "drafting through transformers, which is slower" in done.stderr
    refused = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__KERNELS=first, **broken)
    assert refused.returncode == 2
    assert f"our kernels do not work here: compiled for {first}: dies of SIGILL" in refused.stderr


@needs_compiler
@pytest.mark.skipif(len(ANNOUNCED) < 2, reason="this processor has one instruction set of ours")
@pytest.mark.long
@pytest.mark.parametrize("fault", ["ILLEGAL", "WRONG"])
def test_the_next_instruction_set_takes_over(tiny_models, tmp_path: Path, sound_text, fault: str) -> None:
    broken = {"CXX": faulty_compiler(tmp_path, {ANNOUNCED[0]: globals()[fault]})}
    done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="packed16", **broken)
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert f"our kernels: compiled for {ANNOUNCED[0]}: " in done.stderr


@needs_compiler
@pytest.mark.skipif(len(ANNOUNCED) < 2, reason="this processor has one instruction set of ours")
@pytest.mark.long
def test_the_next_instruction_set_takes_over_in_a_process_that_may_not_use_the_first(
    tiny_models, tmp_path: Path, sound_text
) -> None:
    """Before a trial and after a sound one; a process that may use it is not concerned."""
    compiler = faulty_compiler(tmp_path, {ANNOUNCED[0]: REFUSED})

    def log_of_start() -> str:
        done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="packed16", CXX=compiler)
        assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
        return done.stderr

    refusal, refused = f"our kernels: compiled for {ANNOUNCED[0]}: the system refuses kernels-", tmp_path / "refused"
    refused.touch()
    assert refusal in log_of_start()
    refused.unlink()
    assert "the system refuses" not in log_of_start()
    refused.touch()
    assert refusal in log_of_start()


@needs_compiler
@pytest.mark.long
def test_libraries_that_can_no_longer_be_loaded(tiny_models, tmp_path: Path, sound_text) -> None:
    """Their trials are remembered as sound."""
    generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="float32")
    libraries = list((tmp_path / "native").glob("*.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, 100)
    done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="float32")
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert "cannot be loaded" in done.stderr
    assert "delete it" in done.stderr


@pytest.mark.long
def test_without_a_compiler(tiny_models, tmp_path: Path, sound_text) -> None:
    done = generate(tiny_models, tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stdout == sound_text
    assert "computing without our kernels, which is slower: there is no no-such-compiler" in done.stderr
    refused = generate(tiny_models, tmp_path, CXX="no-such-compiler", OMNIDRAFT_MODELS__PRECISION="int8")
    assert refused.returncode == 2
    assert "install a C++ compiler" in refused.stderr


@needs_compiler
@pytest.mark.long
@pytest.mark.skipif(
    not {"cpuid_fault", "amx_bf16"} <= set(PROCESSOR), reason="needs an Intel processor with AMX whose CPUID can fault"
)
def test_a_virtual_machine_that_hides_the_leaf_of_amx(tiny_models, tmp_path: Path, sound_text) -> None:
    """The very fault of such machines: torch's own product dies, and ours goes on without AMX."""
    hidden = {"LD_PRELOAD": preload("hidden_amx_leaf", tmp_path)}
    product = "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"
    died = subprocess.run([sys.executable, "-c", product], env=os.environ | hidden, check=False)
    assert died.returncode == -signal.SIGILL
    done = generate(tiny_models, tmp_path, OMNIDRAFT_MODELS__PRECISION="bfloat16", **hidden)
    assert (done.returncode, done.stdout) == (0, sound_text), done.stderr
    assert "here oneDNN is kept to AVX512_CORE_BF16" in done.stderr


def test_a_trial_is_remembered_and_an_unreadable_outcome_is_tried_again(tmp_path: Path) -> None:
    note = tmp_path / "runs"
    code = f"open({str(note)!r}, 'a').write('x'); print('{{\"name\": \"part\", \"seconds\": 1.5}}')"
    command = (sys.executable, "-c", code)
    outcomes = [run_once(command, name="it", home=tmp_path) for _ in range(2)]
    assert outcomes == [Outcome({"part": 1.5})] * 2
    assert note.read_text() == "x"
    for remembered in (tmp_path / "probes").glob("*.json"):
        remembered.write_text('{"seconds": {"pa')  # killed while it wrote
    assert run_once(command, name="it", home=tmp_path) == Outcome({"part": 1.5})
    assert note.read_text() == "xx"


def test_a_home_that_cannot_be_written_costs_the_memory_only(tmp_path: Path) -> None:
    (tmp_path / "probes").write_text("a file where the folder should be")
    command = (sys.executable, "-c", "")
    assert run_once(command, name="it", home=tmp_path) == Outcome()


def test_a_command_that_is_killed_for_memory_says_so_and_ends_alike() -> None:
    code = (
        "import os, signal; from omnidraft.child import run_supervised; "
        "run_supervised(lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )
    died = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL
    assert "omnidraft: ended by SIGKILL (Killed); killed from outside, most often because memory ran out" in died.stderr
    assert "Traceback" not in died.stderr


def test_a_command_that_a_signal_ends_says_so_and_ends_alike(tmp_path: Path) -> None:
    code = (
        "import os, signal; from omnidraft.child import run_supervised; "
        "run_supervised(lambda: os.kill(os.getpid(), signal.SIGILL))"
    )
    died = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGILL
    assert "most recent call first" in died.stderr
    assert "omnidraft: ended by SIGILL (Illegal instruction); " in died.stderr
    assert "`omnidraft doctor`" in died.stderr


def test_a_command_ends_though_its_launcher_ignored_the_ends_of_children() -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'import sys; from omnidraft.child import run_supervised; run_supervised(lambda: sys.exit(7))'])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=30).returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_command_reaches_what_it_runs(number: signal.Signals) -> None:
    code = (
        "import signal, sys; from omnidraft.child import run_supervised\n"
        "def command():\n"
        f"    signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "    print('ready', flush=True); signal.pause()\n"
        "run_supervised(command)"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stdout.readline() == b"ready\n"
    command.send_signal(number)
    assert command.wait(30) == 7


def test_the_terminals_interrupt_reaches_what_a_command_runs_in_another_session() -> None:
    code = (
        "import os, signal, sys; from omnidraft.child import run_supervised\n"
        "def command():\n"
        "    os.setsid(); signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "    print('ready', flush=True); signal.pause()\n"
        "run_supervised(command)"
    )
    command, terminal = pty.fork()
    if not command:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    assert os.read(terminal, 100).strip() == b"ready"
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) == 7
    os.close(terminal)


def test_an_interrupt_ends_a_command_by_130_wherever_it_comes(tmp_path: Path) -> None:
    """CPython dies of SIGINT after an interrupt that passed through `exec` of a text, as defining a dataclass does."""
    (tmp_path / "interrupted.py").write_text(
        "import sys; from omnidraft.child import run_supervised\n"
        "def command():\n"
        "    try: exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt: sys.exit(130)\n"
        "run_supervised(command)"
    )
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-m", "interrupted"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_command_that_is_killed_leaves_nothing_running() -> None:
    code = (
        "import os, signal; from omnidraft.child import run_supervised; "
        "run_supervised(lambda: (print(os.getpid(), flush=True), signal.pause()))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert command.stdout is not None
    child = psutil.Process(int(command.stdout.readline()))
    command.kill()
    command.wait()
    child.wait(30)


def test_a_service_that_a_signal_ended_is_reported_by_name_with_its_last_words(tmp_path: Path) -> None:
    code = "import faulthandler, os, sys; faulthandler.enable(); print('loading models', file=sys.stderr); os.abort()"
    with LocalCluster(tmp_path / "logs") as fleet:
        fleet.start("decode_worker", [sys.executable, "-u", "-c", code])
        with pytest.raises(ServiceFailed) as failed:
            fleet.wait_for(lambda: False, "serving worker", 30.0)
    assert "decode_worker ended before serving worker by SIGABRT (Aborted); a crash in native code" in str(failed.value)
    assert 'loading models; it was at File "<string>", line 1' in str(failed.value)


@pytest.mark.long
def test_a_test_process_that_crashes_costs_one_test_and_no_hang(tmp_path: Path) -> None:
    """The crash is in the last file, behind files that are done: where xdist alone would wait for ever."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    from tests.xdist_scheduling import SurvivingScheduling\n"
        "    return SurvivingScheduling(config, log)\n"
    )
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text("def test_passes(): pass\n")
    (tmp_path / "test_9.py").write_text(
        "import os, signal\n"
        "def test_before(): pass\n"
        "def test_dies(): os.kill(os.getpid(), signal.SIGILL)\n"
        "def test_behind(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 1
    assert "1 failed, 5 passed" in ran.stdout
    assert "crashed while running 'test_9.py::test_dies'" in ran.stdout
