"""Programs that mean no harm: they run as `python -c` runs them, within their limits."""
# ruff: noqa: E501  rows of tables

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.sandbox import Level, Limits, Pool, Status, probe
from marl_ray.sandbox.client.worker import Worker
from marl_ray.sandbox.limits import WALL_FACTOR

if not sys.platform.startswith("linux"):
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(workers=2) as pool:
        yield pool


SCRIPTS = {
    "prints": "print('a', 'b')",
    "main": "if __name__ == '__main__': print(__name__, __builtins__.__name__)",
    "reads lines": "import sys\nfor line in sys.stdin: print(line, end='|')",
    "input": "print(int(input()) + int(input()))\ninput()\ninput()",
    "stat of stdin": "import os\nprint(os.read(0, os.fstat(0).st_size))",
    "argv": "import sys\nprint(sys.argv, sys.path[0] == '')",
    "exit": "import sys\nprint('x')\nsys.exit(3)",
    "exit by site": "exit()",
    "exit with text": "raise SystemExit('sorry')",
    "exit with none": "raise SystemExit",
    "error": "def f():\n    return 1 / 0\nf()",
    "chained error": "try:\n    {}['a']\nexcept KeyError:\n    int('x')",
    "syntax error": "def f(:",
    "atexit": "import atexit\natexit.register(print, 'late')\nprint('early')",
    "thread": "import threading, time\ndef f():\n    time.sleep(0.05)\n    print('thread')\nthreading.Thread(target=f).start()\nprint('main')",
    "unicode": "print('\u00fc \U0001f600')",
    "stderr": "import sys\nprint('x', file=sys.stderr)",
    "recursion limit": "import sys\nsys.setrecursionlimit(10000)\ndef f(n): return n and f(n - 1)\nprint(f(5000))",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 0\nprint(P(3))",
    "asyncio": "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))",
    "future": "from __future__ import annotations\ndef f(x: nothing): pass\nprint(f.__annotations__)",
    "temporary file": "import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')\nprint('ok')",
    "class cycle printed at the end": "class A:\n    def __del__(self): print('gone')\na = A()",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_the_interpreter_runs_it(pool, name):
    stdin = b"1\n2\n\n"
    ran = pool.run(SCRIPTS[name], stdin=stdin)
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        peer = subprocess.run([sys.executable, "-c", SCRIPTS[name]], stdin=file, capture_output=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (peer.returncode, peer.stdout)
    assert ran.stderr.splitlines()[-1:] == peer.stderr.splitlines()[-1:]
    assert ran.stderr.count(b"Traceback") == peer.stderr.count(b"Traceback")
    assert ran.status == (Status.EXIT if peer.returncode else Status.OK)


def test_a_program_reads_its_files_and_files_beyond_its_folder_are_refused(pool):
    ran = pool.run(
        "import os, helper\nprint(sorted(os.listdir()), helper.x, open('a/b.txt').read())",
        files={"helper.py": b"x = 5", "a/b.txt": b"text"},
    )
    assert ran.stdout == b"['a', 'helper.py'] 5 text\n", ran.stderr
    assert pool.run("import os\nprint(os.listdir())").stdout == b"[]\n"
    for path in ("/etc/x", "../x", "", "a/../../x"):
        with pytest.raises(MarlRayError, match="files"):
            pool.run("", files={path: b""})


@pytest.mark.parametrize("level", [Level.LIMITS, Level.PATHS, Level.NAMESPACES])
def test_every_run_has_an_untouched_folder(level):
    statements = [
        "os.chmod('.', 0o500)", "os.chmod('.', 0)", "os.umask(0o777)\nos.mkdir('d')", "[os.mkdir(str(n)) for n in range(200)]",
        "os.symlink('/', 'l')\nos.mkfifo('p')\nopen('a\\nb', 'w')", "[(os.mkdir('n'), os.chdir('n')) for _ in range(50)]",
        "os.rename('.', '../other')", "os.rmdir(os.getcwd())", "os.chmod('..', 0)", "open('../x', 'w')", "os.mkdir('../y')",
    ]  # fmt: skip
    honest = (
        "import os\nopen('x', 'w').write('y')\nos.mkdir('z')\nprint(sorted(os.listdir()), oct(os.stat('.').st_mode))"
    )
    with Pool(workers=1, warm=(), min_level=Level.LIMITS, max_level=level) as pool:
        if pool.level < level:
            pytest.skip(f"this host allows only {pool.level.name}")
        for statement in statements:
            pool.run(f"import os\n{statement}")
            ran = pool.run(honest)
            assert ran.stdout == b"['x', 'z'] 0o40700\n", (statement, ran.stderr)


def test_the_folder_is_tmp_where_there_are_namespaces(pool):
    if sys.prefix.startswith("/tmp/"):
        pytest.skip("the packages that programs may read lie below /tmp here")
    if pool.level == Level.NAMESPACES:
        assert pool.run("import os\nopen('/tmp/f', 'w')\nprint(os.getcwd(), os.listdir())").stdout == b"/tmp ['f']\n"
        assert pool.run("import os\nprint(os.listdir('/tmp'))").stdout == b"[]\n"


def test_a_package_that_is_not_warm_is_not_there(pool):
    program = "try: import pytest\nexcept ModuleNotFoundError as error: print(error)"
    assert pool.run(program).stdout == b"No module named 'pytest'\n"


def test_the_environment_is_scrubbed(pool, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    ran = pool.run("import os\nprint(sorted(os.environ), os.getcwd() == os.environ['HOME'])")
    assert b"SECRET_KEY" not in ran.stdout
    assert b"True" in ran.stdout


def test_limits_decide_the_status(pool):
    small = Limits(wall_s=0.5, memory_bytes=200 << 20, output_bytes=100, file_bytes=1000)
    assert pool.run("while True: pass", limits=small).status == Status.TIMEOUT
    assert pool.run("import time\ntime.sleep(99)", limits=small).status == Status.TIMEOUT
    spun = pool.run("while True: pass", limits=Limits(wall_s=30, cpu_s=0.2))
    assert spun.status == Status.TIMEOUT and 0.2 <= spun.cpu_s < 0.7
    assert pool.run("x = 'a' * (1 << 30)", limits=small).status == Status.OOM
    flood = pool.run("while True: print('x' * 50)", limits=small)
    assert (flood.status, len(flood.stdout)) == (Status.OUTPUT_LIMIT, 100)
    assert pool.run("import os\nos.abort()").status == Status.CRASH
    assert (
        b"File too large"
        in pool.run("f = open('f', 'wb')\nf.write(b'x' * 2000)\nf.close()", limits=Limits(file_bytes=1000)).stderr
    )


def test_every_run_has_randomness_of_its_own_and_the_same_hashes(pool):
    program = "import random\nprint(random.random())\nprint(hash('a'), [*{'a', 'b', 'c'}])"
    runs = [pool.run(program).stdout.splitlines() for _ in range(4)]
    assert len({first for first, _ in runs}) == 4
    assert len({second for _, second in runs}) == 1


OFFICIAL = {
    "assert 1 + 1 == 2": "passed",
    "assert False, 'no'": "failed: no",
    "raise KeyError('k')": "failed: 'k'",
    "def f(:": "failed: invalid syntax (<string>, line 1)",
    "import sys\nsys.exit(0)": "failed: 0",
    "raise KeyboardInterrupt": "failed: ",
    "import os\nos._exit(0)": "timed out",
    "while True: pass": "timed out",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass": "timed out",
    "import os\nos.getcwd()": "failed: 'NoneType' object is not callable",
    "exit()": "failed: 'NoneType' object is not callable",
    "import subprocess\nsubprocess.run(['true'])": "failed: 'NoneType' object is not callable",
    "import resource": "failed: import of resource halted; None in sys.modules",
    "input()": "failed: ",
    "print('x')\nassert __name__ == 'builtins'": "passed",
    "class E(Exception):\n    def __str__(self): raise self\nraise E": "timed out",
    "import sys\nf = sys._getframe()\nwhile 'result' not in f.f_locals: f = f.f_back\nf.f_locals['result'].append('passed')\n1/0": "passed",
}  # fmt: skip


@pytest.mark.parametrize("program", OFFICIAL)
def test_the_official_mode_says_what_the_official_harness_says(pool, program):
    assert pool.official(program, Limits(wall_s=0.7)) == OFFICIAL[program]


def test_cpu_time_decides_and_waiting_is_bounded(pool):
    limits = Limits(cpu_s=0.2)
    patient = replace(limits, wall_s=60.0)  # a crowd may keep a program waiting for longer than `WALL_FACTOR` allows
    assert pool.run("import time\ntime.sleep(0.4)", limits=patient).status == Status.OK
    assert pool.judge("import time\ndef f(x): time.sleep(0.4)", "f(1)", entry_point="f", limits=patient).passed
    # The harness counts time in which a program sleeps, and not, here, time in which it waits for a core.
    assert pool.official("import time\ntime.sleep(0.4)", patient) == "timed out"
    busy = "import time\nwhile time.process_time() < 0.15: pass"
    crowd = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        assert pool.official(busy, patient) == "passed"
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    slept = pool.run("import time\ntime.sleep(99)", limits=limits)
    assert slept.status == Status.TIMEOUT and slept.wall_s >= WALL_FACTOR * limits.cpu_s


def test_a_frame_is_as_large_as_the_limits_say(pool):
    candidate, tests = "def f(n): return 'x' * n", "assert len(f(2_000_000)) == 2_000_000"
    assert pool.judge(candidate, tests, entry_point="f").passed
    small = Limits(frame_bytes=1_000_000)
    assert pool.judge(candidate, tests, entry_point="f", limits=small).verdict == "fail:encode"
    endless = "import itertools\ndef f(n): return itertools.count()"
    assert pool.judge(endless, "sum(f(1))", entry_point="f", limits=small).verdict == "fail:encode"


MESSAGES = {
    "long": "def f(x): raise ValueError('\U0001f600' * 5000)",
    "surrogates": "def f(x): raise ValueError('\\ud800' * 5000)",
    "no text": "def f(x): return 10**5000",
    "exit": "import sys\ndef f(x): sys.exit('\U0001f600' * 5000)",
    "forged": "import os\nd = b'{\"exit\":[[1e999,{}]],\"value\":1}'\nos.write(3, len(d).to_bytes(4, 'little') + d)",
    "no frame": "import os\nos.write(3, b'\\x01\\0\\0\\0\\xff')",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_program_says_is_a_verdict_and_a_short_text(pool, name):
    judged = pool.judge(MESSAGES[name], "assert f(1) == 2, f(1)", entry_point="f")
    assert not judged.passed and len(judged.message.encode()) <= 2000
    for program in (
        MESSAGES[name],
        f"{MESSAGES[name]}\nf(1)",
        "import os\nos.write(3, b'\\x09' + b'\\xff' * 99)\nos._exit(0)",
    ):
        pool.official(program).encode()


def kill_server(worker: Worker) -> None:
    """Kill the fork server of a worker, and return once it is dead."""
    server = worker.pids[0]
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def test_a_program_that_kills_every_server_is_to_blame(pool, monkeypatch):
    requested = Worker.request

    def killed(worker: Worker, kind: bytes, limits: Limits, fds: Sequence[int]) -> None:
        if limits.open_files == 63:
            kill_server(worker)
        requested(worker, kind, limits, fds)

    monkeypatch.setattr(Worker, "request", killed)
    fatal = Limits(open_files=63)
    assert pool.judge("def f(x): return x", "f(1)", entry_point="f", limits=fatal).verdict == "fail:crash"
    assert pool.run("", limits=fatal).status == Status.CRASH
    assert pool.official("", fatal) == "timed out"
    assert pool.run("print(1)").stdout == b"1\n"


def test_runs_die_before_their_server_when_memory_is_used_up():
    if int(Path("/proc/self/oom_score_adj").read_text()) > 0:
        pytest.skip("whoever started these tests wants them to die early")
    with Pool(workers=1, warm=(), min_level=Level.LIMITS, max_level=Level.LIMITS) as pool:
        assert pool.run("print(open('/proc/self/oom_score_adj').read())").stdout == b"1000\n\n"
        server = pool.workers[0].pids[0]
        assert Path(f"/proc/{server}/oom_score_adj").read_text() == "0\n"


def test_threads_share_the_pool(pool):
    with ThreadPoolExecutor(6) as threads:
        texts = [*threads.map(lambda n: pool.run(f"print({n})").stdout, range(24))]
    assert texts == [b"%d\n" % n for n in range(24)]


def test_a_dead_server_is_replaced(pool):
    for worker in pool.workers:
        kill_server(worker)
    for _ in pool.workers:
        assert pool.run("print(1)").stdout == b"1\n"


def test_an_interrupted_run_does_not_answer_for_the_next(pool, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("marl_ray.sandbox.client.pool.execution_of", interrupted)
        for _ in pool.workers:
            with pytest.raises(KeyboardInterrupt):
                pool.run("print('old')")
    for number in range(4):
        assert pool.run(f"print({number})").stdout == b"%d\n" % number


def test_folders_of_killed_owners_are_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Pool(workers=1, warm=()):
        used = os.listdir(tmp_path)
        (tmp_path / "marl-ray-sandbox.forgotten/work/deep").mkdir(parents=True)
        (tmp_path / "marl-ray-sandbox.link").symlink_to(tmp_path)
        (tmp_path / "other").mkdir()
        with Pool(workers=1, warm=()) as second:
            assert len(used) == 1
            assert {*os.listdir(tmp_path)} - {os.path.basename(second.workers[0].folder)} == {
                *used, "marl-ray-sandbox.link", "other",
            }  # fmt: skip
            assert second.run("print(1)").stdout == b"1\n"


def test_a_server_that_says_nothing_is_told_from_one_that_ends(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(MarlRayError, match=r"^the sandbox cannot start: its process ended$"):
        Pool(workers=1)
    monkeypatch.undo()
    monkeypatch.setattr("marl_ray.sandbox.client.process.START_S", 0.0)
    with pytest.raises(MarlRayError, match=r"^the sandbox cannot start: no answer in 0 s$"):
        Pool(workers=1)


def test_a_level_that_the_host_lacks_is_refused():
    with pytest.raises(MarlRayError, match="min_level NAMESPACES: this host allows only LIMITS"):
        Pool(workers=1, min_level=Level.NAMESPACES, max_level=Level.LIMITS)
    with pytest.raises(MarlRayError, match="workers"):
        Pool(workers=0)
    assert Level.LIMITS <= probe() <= Level.NAMESPACES
