"""Attacks on the host and on other jobs: what a program must not reach, use up or leave behind.

Executed, this file makes them all and prints a report: so another user than the tests' can be the attacker.
"""
# ruff: noqa: E501  rows of tables

import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from hostile.attacks import MB, RIGHT, TESTS, WALL_S, honest_job, time_lateness

# each must be refused; what a program tries first makes no difference to what it may print
REFUSED = {
    8: ["open('/etc/passwd')", "open('/proc/self/mem')", "open('/proc/self/environ')", "os.listdir('/proc/self/fd')",
        "open('/proc/1/mem')", "os.listdir('/dev/shm')", "os.listdir('/var/tmp')", "os.listdir(os.path.expanduser('~root'))",
        "open(SECRET_FILE).read()", "os.listdir('..')", "os.environ['API_KEY']", "open(os.__file__, 'a')"],
    14: ["os.fork()", "posix.fork()", "os.forkpty()", "subprocess.run(['/bin/true'])", "os.system('true') and 1/0",
         "multiprocessing.Process(target=print).start()", "os.execv('/bin/true', ['true'])",
         "os.posix_spawn('/bin/true', ['true'], {})", "libc('fork')", "libc('vfork')", "syscall(56, 17)", "syscall(435, 0, 0)"],
    16: ["os.kill(-1, 9)", "os.kill(os.getppid() or 1, 0)", "os.kill(1, 9)", "os.killpg(0, 9)", "os.kill(VICTIM, 0)",
         "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)", "os.pidfd_open(1)",
         "syscall(234, VICTIM, VICTIM, 9)", "syscall(200, VICTIM, 9)", "fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM)"],
    17: ["libc('ptrace', 16, VICTIM, 0, 0)", "syscall(310, VICTIM, 0, 0, 0, 0, 0)", "open(f'/proc/{VICTIM}/mem')"],
    18: ["open('../x', 'w')", "open('/var/tmp/x', 'w')", "os.link('/etc/passwd', 'x')", "os.mkdir('/x')",
         "os.rename('.', '/var/tmp/x')", "open('big', 'wb').truncate(1 << 40)", "os.symlink('/etc/passwd', 'l') or open('l')",
         "os.truncate(SECRET_FILE, 0)", "os.chmod(SECRET_FILE, 0)", "os.utime(SECRET_FILE)", "os.unlink(SECRET_FILE)",
         "os.utime('/dev/null')", "os.chmod('/dev/null', 0)", "libc('fallocate', os.open('s', 66), 1, 0, 1 << 34)"],
    19: ["socket.socket()", "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "socket.socket(socket.AF_UNIX)",
         "socket.socket(socket.AF_VSOCK)", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
         "socket.create_connection(('169.254.169.254', 80))", "socket.create_connection(('127.0.0.1', 6379))",
         "socket.getaddrinfo('example.org', 80)", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"],
    22: ["mmap.mmap(-1, 4096, prot=7)", "libc('mprotect', 0, 4096, 7)", "syscall(0x40000000 + 41, 2, 1, 0) and 0"],
    23: ["os.setuid(0)", "os.setresuid(0, 0, 0)", "libc('unshare', 0x10000000)", "libc('unshare', 0x20000)",
         "libc('mount', 0, 0, 0, 0, 0)", "os.chroot('.')", "syscall(250, 0, 0, 0, 0)", "syscall(321, 0, 0, 0)",
         "syscall(323, 0)", "syscall(425, 8, 0)", "syscall(298, 0, 0, -1, -1, 0)", "libc('prctl', 4, 1, 0, 0, 0)",
         "libc('prctl', 1, 0, 0, 0, 0)", "syscall(126, 0, 0)", "libc('personality', 0x40000)", "os.sched_setaffinity(0, [0])",
         "os.setpriority(0, 0, -5)", "os.nice(-5)", "os.memfd_create('x')", "syscall(308, 0, 0)", "syscall(304, 0, 0, 0)"],
    25: ["open(os.path.join(os.path.dirname(os.__file__), 'x.py'), 'w')", "open('/dev/shm/x', 'w')",
         "multiprocessing.shared_memory.SharedMemory(create=True, size=9)", "libc('shmget', 1, 4096, 0o1666)",
         "_c.sem_open(b'/x', 64, 0o600, 1) or 1/0"],
}  # fmt: skip
PRELUDE = """
import ctypes, errno, fcntl, mmap, os, posix, signal, socket, subprocess, sys
import multiprocessing, multiprocessing.shared_memory
_c = ctypes.CDLL(None, use_errno=True)
def _checked(result):
    if result == -1: raise OSError(ctypes.get_errno(), 'refused')
    if result == 0 and _forked: os._exit(0)
    return result
_forked = False
def libc(name, *args):
    return _checked(getattr(_c, name)(*map(ctypes.c_long, args)))
def syscall(number, *args):
    return _checked(_c.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)))
"""


def refused_program(statement: str, victim: int, secret: str) -> str:
    lines = PRELUDE, f"VICTIM, SECRET_FILE = {victim}, {secret!r}", "try:", f"    {statement}", "    print('SUCCEEDED')"
    return "\n".join((*lines, "except BaseException as error: print('refused', type(error).__name__, error)"))


# name, program, statuses; the program runs with 256 MB, one second of CPU, 64 kB of output
RUNS = [
    (11, "flood", "while True: print('x' * 999)", {"output_limit"}),
    (11, "flood of raw writes", "import os\nwhile True: os.write(2, b'x' * 65536)", {"output_limit"}),
    (11, "a gigabyte without newline", "import sys\nfor _ in range(1 << 14): sys.stdout.write('x' * 65536)", {"output_limit"}),
    (13, "memory", "x = [0]\nwhile True: x += x", {"oom"}),
    (13, "files in memory", "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * (1 << 24)); n += 1",
     {"exit", "output_limit", "timeout"}),
    (15, "daemon", "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()", {"exit"}),
    (18, "inodes", "import os\nn = 0\nwhile True: os.mkdir(str(n)); n += 1", {"exit", "output_limit", "timeout"}),
    (18, "deep folders", "import os\nwhile True: os.mkdir('d'); os.chdir('d')", {"exit", "output_limit", "timeout"}),
    (18, "sparse file", "open('s', 'wb').seek(1 << 40)\nf = open('s', 'wb'); f.seek(1 << 40); f.write(b'x'); f.close()", {"exit"}),
    (18, "closed folders", "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nfor p in ('a/b', 'a'):\n"
     "    try: os.chmod(p, 0)\n    except PermissionError: pass", {"ok"}),
    (18, "links", "import os\nos.symlink('/etc', 'l')\nos.symlink('.', 'm')\nopen('f', 'w')\nos.link('f', 'g')\nos.mkfifo('p')",
     {"ok"}),
    (24, "clock and seed", "import os, time\ntime.time = lambda: 0\nos.environ['PYTHONHASHSEED'] = '7'\nimport random\nrandom.seed(1)",
     {"ok"}),
    (25, "modules", "import json, builtins, sys\njson.loads = json.dumps = None\nbuiltins.print = None\nsys.path[:] = []", {"ok"}),
    (25, "left files", "open('left', 'w').write('x')\nopen('math.py', 'w').write('1/0')\nopen('sitecustomize.py', 'w')", {"ok"}),
    (26, "stdin twice", "import os, sys\nn = os.fstat(0).st_size\na = sys.stdin.buffer.read()\nos.lseek(0, 0, 0)\n"
     "assert a == os.read(0, n) == b'in\\x00put\\xff\\r\\n', a", {"ok"}),
    (26, "stdin cannot be written", "import os\nos.write(0, b'x')", {"exit"}),
    (26, "text that is none", "import sys\nsys.stdout.buffer.write(b'\\xff\\x00')", {"ok"}),
    (26, "byte order mark", "\ufeffprint(1)", {"ok", "exit"}),
    (26, "null in the source", "print(1)\0", {"exit"}),
    (26, "encoding cookie", "# -*- coding: utf-7 -*-\nprint('\u00e9')", {"ok"}),
    (30, "no output and no error", "", {"ok"}),
    (2, "abort", "import os\nos.abort()", {"crash"}),
]  # fmt: skip

# each ends when its CPU time is used up, which the kernel's own limit knows in whole seconds only
SPINNING = {
    "loop": "while True: pass",
    "threads": "import threading\ndef spin():\n    while True: pass\nfor _ in range(3): threading.Thread(target=spin).start()",
    "loop in C": "sum(range(10**12))",
}  # fmt: skip


def attack(max_level: str, victim: int, secret: str) -> dict[str, Any]:
    """Run everything in a pool of one worker; after each attack an honest job must get its right answer."""
    from marl_ray.sandbox import Level, Limits, Pool

    small = Limits(wall_s=WALL_S, cpu_s=0.3, memory_bytes=256 * MB)
    patient = replace(small, cpu_s=0.5, wall_s=20.0)
    report: dict[str, Any] = {"refused": {}, "runs": {}, "unharmed": {}, "late": {}, "cpu": {}}
    with Pool(workers=1, max_level=Level[max_level]) as pool:
        report["level"] = pool.level.name
        pool.judge(RIGHT, TESTS, entry_point="add")  # starts the judge
        for number, name, program, allowed in RUNS:
            key = f"{number} {name}"
            ran, report["late"][key] = time_lateness(
                partial(pool.run, program, stdin=b"in\0put\xff\r\n", limits=small), WALL_S
            )
            if ran.status == "timeout" and "timeout" not in allowed:  # a busy machine: only CPU time counts
                ran = pool.run(program, stdin=b"in\0put\xff\r\n", limits=patient)
            error = ran.stderr[-300:].decode("utf-8", "replace")
            report["runs"][key] = [ran.status, error, len(ran.stdout), len(ran.stderr)]
            report["unharmed"][key] = honest_job(pool, patient)
        for name, program in SPINNING.items():
            ran, _ = time_lateness(partial(pool.run, program, limits=replace(small, wall_s=30.0, cpu_s=0.6)), 30.0)
            report["cpu"][name] = [ran.status, ran.cpu_s]
        for number, statements in REFUSED.items():
            for statement in statements:
                program = refused_program(statement, victim, secret)
                ran = pool.run(program, limits=Limits(wall_s=3, memory_bytes=256 * MB))
                report["refused"][f"{number} {statement}"] = [ran.status, (ran.stdout + ran.stderr[-300:]).decode()]
        processes = pool.workers[0].pids
        report["folder"] = pool.workers[0].folder
    report["left"] = [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    report["left"] += [report["folder"]] if os.path.exists(report["folder"]) else []
    return report


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
