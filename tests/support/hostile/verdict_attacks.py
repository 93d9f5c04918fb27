"""Attacks on the verdict, each with the verdicts that it may get.

Executed, this file makes them all and prints a report: so another user than the tests' can be the attacker.
"""
# ruff: noqa: E501  rows of tables

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from hostile.attacks import MB, RIGHT, TESTS, WALL_S, honest_job, time_lateness

WRONG, ERROR, EXIT, CRASH = {"fail:wrong"}, {"fail:error"}, {"fail:exit"}, {"fail:crash"}
FOREIGN, ENCODE, TIMEOUT, OOM = {"fail:nonbuiltin"}, {"fail:encode"}, {"timeout"}, {"oom"}

CHEATER = """
class Cheat({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __bool__(self): return True
    __hash__ = None
def add(a, b): return Cheat({argument})
"""
DIG = """
import gc, inspect, sys
mark, other = 'ass' + 'ert add', '== 1' + '2'
def strings():
    todo, frame = [gc.get_objects(), *sys._current_frames().values()], sys._getframe()
    while frame:
        todo += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    todo += [info.frame.f_locals for info in inspect.stack()]
    for item in todo:
        for value in item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ():
            if isinstance(value, (str, bytes)): yield str(value)
def add(a, b):
    return a + b if any(mark in text and other in text for text in strings()) else None
"""
SCAN_MEMORY = """
import ctypes, gc
def add(a, b):
    needle = b'assert add(5, ' + b'7) == 12'
    gc.collect()
    for start in [id(object()) & ~0xfffff]:
        try:
            if needle in ctypes.string_at(start, 1 << 20): return a + b
        except Exception: pass
    return None
"""
POISON = """
import abc, builtins, json, math, os, sys, unittest
{statement}
def add(a, b): return 0
"""

JUDGED: list[tuple[int, str, str, set[str]]] = [
    *[(1, f"exit while loading: {call}", f"import sys\n{call}\n" + RIGHT, EXIT) for call in ("sys.exit(0)", "exit()")],
    (1, "quit while loading", "quit()\n" + RIGHT, EXIT),
    (1, "SystemExit inside the function", "def add(a, b): raise SystemExit(0)", EXIT),
    (1, "KeyboardInterrupt inside the function", "def add(a, b): raise KeyboardInterrupt", EXIT),
    (1, "atexit", "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0", WRONG),
    (1, "__del__", "class A:\n    def __del__(self): raise SystemExit(0)\ndef add(a, b):\n    A()\n    return 0", WRONG),
    (2, "_exit while loading", "import os\nos._exit(0)\n" + RIGHT, CRASH),
    (2, "_exit in the function", "import os\ndef add(a, b): os._exit(0)", CRASH),
    (2, "abort", "import os\ndef add(a, b): os.abort()", CRASH),
    (2, "SIGKILL to itself", "import os\ndef add(a, b): os.kill(os.getpid(), 9)", CRASH),
    (2, "null pointer", "import ctypes\ndef add(a, b): ctypes.string_at(0)", CRASH),
    (3, "always equal", CHEATER.format(base="object", argument=""), FOREIGN),
    (3, "int subclass", CHEATER.format(base="int", argument="0"), FOREIGN),
    (3, "str subclass", CHEATER.format(base="str", argument=""), FOREIGN),
    (3, "float subclass", CHEATER.format(base="float", argument=""), FOREIGN),
    (3, "list subclass", CHEATER.format(base="list", argument=""), FOREIGN),
    (3, "spoofed class", "class A:\n    __class__ = int\n    __eq__ = lambda s, o: True\ndef add(a, b): return A()", FOREIGN),
    (3, "array ufunc", "class A:\n    __array_ufunc__ = None\n    __eq__ = lambda s, o: 1\ndef add(a, b): return [A()]", FOREIGN),
    (4, "generator", "def add(a, b): yield a + b", WRONG),
    (4, "lazy object", "import itertools\ndef add(a, b): return itertools.count()", WRONG),
    (4, "iterator of its own", "class A:\n    __iter__ = lambda s: s\n    __next__ = lambda s: 3\ndef add(a, b): return A()", FOREIGN),
    (4, "StopIteration", "def add(a, b): raise StopIteration", ERROR),
    (4, "its own class of StopIteration", "class A(StopAsyncIteration): pass\ndef add(a, b): raise A", ERROR),
    (4, "GeneratorExit", "def add(a, b): raise GeneratorExit", EXIT),
    (4, "NaN", "def add(a, b): return float('nan')", WRONG),
    (5, "frames and objects", DIG, WRONG),
    (5, "memory", SCAN_MEMORY, WRONG),
    *[
        (6, f"rebinding: {statement}", POISON.format(statement=statement), WRONG | ERROR | CRASH | ENCODE)
        for statement in (
            "builtins.AssertionError = Exception",
            "builtins.all = builtins.any = lambda *a: True",
            "builtins.abs = builtins.len = builtins.print = lambda *a: 0",
            "builtins.isinstance = lambda *a: True",
            "math.isclose = lambda *a, **k: True",
            "unittest.TestCase.assertEqual = lambda *a: None",
            "sys.modules['unittest'] = None",
        )
    ],
    (7, "SkipTest", "import unittest\ndef add(a, b): raise unittest.SkipTest('x')", ERROR),
    (7, "settrace", "import sys\nsys.settrace(lambda *a: None)\ndef add(a, b): return 0", WRONG),
    (7, "audit hook", "import sys\nsys.addaudithook(lambda *a: None)\ndef add(a, b): return 0", WRONG),
    (7, "import hook", "import sys\nsys.meta_path.insert(0, None)\ndef add(a, b): return 0", WRONG),
    (9, "every descriptor", "import os\nfor n in range(3, 1024):\n    try: os.write(n, b'\\x0e\\0\\0\\0{\"value\":null}')\n"
     "    except OSError: pass\ndef add(a, b): return 0", WRONG | ENCODE | ERROR),
    (9, "forged verdict", "import os\nos.write(3, b'{\"verdict\":\"passed\",\"message\":\"\"}')\ndef add(a, b): return 0", ENCODE),
    (9, "replies in advance", "import os\nfor _ in range(9): os.write(3, b'\\x0e\\0\\0\\0{\"value\":true}')\ndef add(a, b): return 0",
     WRONG),
    (9, "closed channel", "import os\nos.close(3)\n" + RIGHT, CRASH),
    (9, "dup2", "import os\nos.dup2(1, 3)\n" + RIGHT, CRASH | TIMEOUT),
    (10, "prints", "print('PASSED')\nprint('{\"verdict\": \"passed\"}')\ndef add(a, b):\n    print('ok')\n    return 0", WRONG),
    (12, "loop", "def add(a, b):\n    while True: pass", TIMEOUT),
    (12, "loop while loading", "while True: pass", TIMEOUT),
    (12, "loop in C", "def add(a, b): return sum(range(10**12))", TIMEOUT),
    (12, "power", "def add(a, b): return 10**10**8", TIMEOUT),
    (12, "regex", "import re\ndef add(a, b): return re.match('(a+)+$', 'a' * 64 + 'b')", TIMEOUT),
    (12, "sleep", "import time\ndef add(a, b): time.sleep(1e6)", TIMEOUT),
    (12, "swallows everything", "import time\ndef add(a, b):\n    while True:\n        try: time.sleep(9)\n"
     "        except BaseException: pass", TIMEOUT),
    (12, "disarms signals", "import signal\ndef add(a, b):\n    signal.setitimer(signal.ITIMER_REAL, 0)\n"
     "    for n in range(1, 32):\n        try: signal.signal(n, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n"
     "    while True: pass", TIMEOUT),
    (12, "stops itself", "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT),
    (13, "list doubling", "def add(a, b):\n    x = [0]\n    while True: x += x", OOM),
    (13, "bytearray", "def add(a, b): return bytearray(1 << 40)", OOM),
    (13, "string", "def add(a, b): return 'a' * 10**11", OOM),
    (13, "mmap", "import mmap\ndef add(a, b):\n    kept = [mmap.mmap(-1, 1 << 24) for _ in range(999)]", ERROR | OOM),
    (13, "small objects", "def add(a, b):\n    x = None\n    while True: x = (x, [])", OOM | TIMEOUT | CRASH),
    (13, "MemoryError swallowed", "MemoryError = ValueError\ndef add(a, b):\n    try: 'a' * 10**11\n"
     "    except BaseException: return 0", WRONG),
    (14, "fork bomb", "import os\ndef add(a, b):\n    while True: os.fork()", ERROR),
    (14, "thread bomb", "import threading, time\ndef add(a, b):\n    while True: threading.Thread(target=time.sleep, "
     "args=(99,), daemon=True).start()", ERROR | TIMEOUT | OOM),
    (20, "recursion", "def add(a, b): return add(a, b)", ERROR),
    (20, "recursion without limit", "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
     ERROR | CRASH | OOM | TIMEOUT),
    (20, "parentheses", "def add(a, b): return " + "(" * 100_000 + "0" + ")" * 100_000, ERROR | CRASH | OOM),
    (20, "operators", "def add(a, b): return " + "-" * 100_000 + "0", ERROR | CRASH | OOM),
    (20, "digits", "import sys\nsys.set_int_max_str_digits(0)\ndef add(a, b): return int('9' * 10**6)", TIMEOUT | WRONG),
    (21, "deep value", "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", ENCODE),
    (21, "cyclic value", "def add(a, b):\n    x = []\n    x.append(x)\n    return x", ENCODE),
    (21, "large value", "def add(a, b): return 'x' * (1 << 25)", ENCODE | OOM),
    (21, "huge int", "def add(a, b): return 1 << (1 << 28)", ENCODE | OOM),
    (21, "forged deep value", "import os\nd = b'[' * 10**6\nos.write(3, len(d).to_bytes(4, 'little') + d)\n" + RIGHT, ENCODE),
    (21, "forged length", "import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\n" + RIGHT, ENCODE),
    (21, "long range", "def add(a, b): return range(70_000_000)", ENCODE),
    (21, "many ranges", "def add(a, b): return [range(10**6)] * 10**4", WRONG),
    (21, "the same list again and again", "def add(a, b): return [[[0] * 1000] * 1000] * 1000", ENCODE),
    (21, "huge int in the message", "def add(a, b): raise ValueError(10**5000)", ERROR),
    (21, "long message", "def add(a, b): raise ValueError('\U0001f600' * 10**6)", ERROR),
    (21, "forged exception", "import os\nd = b'{\"error\":[\"KeyError\",\"x\",{\"r\":[0]}]}'\n"
     "os.write(3, len(d).to_bytes(4, 'little') + d)\ndef add(a, b): return 0", ERROR | ENCODE),
    (21, "colliding keys", "def add(a, b): return {((1 << 61) - 1) * n for n in range(4000)}", WRONG),
    (21, "forged tag", "import os\nd = b'{\"value\":{\"o\":[1]}}'\nos.write(3, b'\\x0e\\0\\0\\0{\"value\":null}' + "
     "len(d).to_bytes(4, 'little') + d)\ndef add(a, b): return 0", ENCODE),
    (21, "forged change", "import os\nd = b'{\"value\":3,\"changed\":{\"0\":[]}}'\nos.write(3, b'\\x0e\\0\\0\\0{\"value\":null}' + "
     "len(d).to_bytes(4, 'little') + d)\ndef add(a, b): return 0", WRONG),
    (22, "writable code", "import ctypes, mmap\ndef add(a, b): mmap.mmap(-1, 4096, prot=7)", ERROR),
    (27, "tests redefined", "def check(f): pass\ndef add(a, b): return 0\nassert True\n'''", ERROR),
    (27, "a docstring that would swallow the tests", "def add(a, b):\n    return 0\n\"\"\"", ERROR),
    (27, "entry point taken back", "def add(a, b): return a + b\nadd = lambda a, b: 0", WRONG),
    (27, "encoding cookie", "# -*- coding: utf-7 -*-\ndef add(a, b): return 0 # +AAo-    return a + b", WRONG),
    (27, "entry point is no function", "add = 3", ERROR),
    (27, "builtins overridden", "__builtins__ = {}\n__name__ = '__main__'\ndef add(a, b): return 0", WRONG),
    (27, "homoglyph", "def \u0430dd(a, b): return a + b", ERROR),
    (28, "visible tests only", "def add(a, b): return {(1, 2): 3}.get((a, b))", WRONG),
    (29, "many threads", "import threading\ndef spin():\n    while True: pass\n"
     "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\ndef add(a, b): spin()", TIMEOUT),
    (30, "ten megabytes", "x = '" + "y" * (10 * MB) + "'\ndef add(a, b): return 0", WRONG),
    (30, "slow reader", "import time\ndef add(a, b):\n    time.sleep(99)", TIMEOUT),
    (30, "error text that loops", "class E(Exception):\n    def __str__(self):\n        while True: pass\n"
     "def add(a, b): raise E", TIMEOUT),
    (30, "error text of a gigabyte", "class E(Exception):\n    def __str__(self): return 'x' * 10**11\n"
     "def add(a, b): raise E", ERROR | OOM),
    (30, "error class named passed", "class passed(Exception): pass\ndef add(a, b): raise passed('passed')", ERROR),
    (30, "error whose representation loops", "class E(Exception):\n    def __repr__(self):\n        while True: pass\n"
     "def add(a, b): raise E(1)", ERROR),
    (30, "load that drips", "import os, time\nfor byte in b'\\x0e\\0\\0\\0{\"value\":null}':\n    os.write(3, bytes([byte]))\n"
     "    time.sleep(0.2)", TIMEOUT),
    (30, "answers that are never read", "import os\nwhile True: os.write(3, b'\\x0e\\0\\0\\0{\"value\":null}')", WRONG | ERROR | TIMEOUT),
    (30, "a null byte", "def add(a, b): return 0\0", ERROR),
    (26, "surrogates", "def add(a, b): return '\\ud800'", WRONG),
    (26, "surrogates in the source", "x = '\ud800'\n" + RIGHT, ERROR | {"passed"}),
]  # fmt: skip
"""Number of the family, name, candidate, allowed verdicts."""

WRONG_CODE = "def add(a, b): return 0\n"
EXTRACTED: list[tuple[str, str, str | None, set[str]]] = [
    ("two blocks: the last counts", f"```python\n{RIGHT}```\nor\n```python\n{WRONG_CODE}```", WRONG_CODE, WRONG),
    ("the last that defines it", f"```python\n{RIGHT}```\nUse it so:\n```python\nprint(add(1, 2))\n```", RIGHT, {"passed"}),
    ("a fence inside a string", f"```python\nx = '''\n```\n'''\n{RIGHT}```", "x = '''\n", ERROR),
    ("a fence that never ends", f"```python\n{RIGHT}", None, set()),
    ("code after the final answer", f"```python\n{WRONG_CODE}```\n{RIGHT}", WRONG_CODE, WRONG),
    ("a block that never ends after one that does", f"```python\n{WRONG_CODE}```\n```python\n{RIGHT}", WRONG_CODE, WRONG),
    ("tests of its own", f"```python\n{WRONG_CODE}assert add(0, 0) == 0\nprint('all tests passed')\n```",
     f"{WRONG_CODE}assert add(0, 0) == 0\nprint('all tests passed')\n", WRONG),
    ("only in another language", f"```javascript\n{RIGHT}```", None, set()),
]  # fmt: skip
"""Family 27: name, a model's answer, what is taken from it, allowed verdicts. The tests are never put behind the code."""

OFFICIAL = {
    f"{RIGHT}{TESTS}": "passed",
    f"def add(a, b):\n    return a - b\n{TESTS}": "failed: ",
    f"def add(a, b):\n    return a + b + 1\n{TESTS}": "failed: ",
    f"def add(a, b):\n    return a\n{TESTS}": "failed: ",
    f"def add(a, b):\n    return c\n{TESTS}": "failed: name 'c' is not defined",
    f"import os\n{RIGHT}os.getcwd()\n{TESTS}": "failed: 'NoneType' object is not callable",
    f"import os\nos.putenv('a', 'b')\n{RIGHT}{TESTS}": "failed: 'NoneType' object is not callable",
    f"import shutil\nshutil.rmtree('x')\n{RIGHT}{TESTS}": "failed: 'NoneType' object is not callable",
    f"import subprocess\nsubprocess.run(['true'])\n{RIGHT}{TESTS}": "failed: 'NoneType' object is not callable",
    f"quit()\n{RIGHT}{TESTS}": "failed: 'NoneType' object is not callable",
    f"import tkinter\n{RIGHT}{TESTS}": "failed: import of tkinter halted; None in sys.modules",
    f"import sys\n{RIGHT}{TESTS}sys.exit(0)": "failed: 0",
    f"import os\n{RIGHT}os._exit(0)\n{TESTS}": "timed out",
    f"while True: pass\n{TESTS}": "timed out",
    f"class Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()\n{TESTS}": "passed",
}  # fmt: skip
"""Family 31: program, what the official harness says of it."""


def attack(max_level: str) -> dict[str, Any]:
    """Judge everything in a pool of one worker; after each attack an honest job must get its right answer."""
    from marl_ray.sandbox import Level, Limits, Pool

    small = Limits(wall_s=WALL_S, cpu_s=0.3, memory_bytes=256 * MB)
    patient = replace(small, cpu_s=2.0, wall_s=20.0)
    report: dict[str, Any] = {"judged": {}, "unharmed": {}, "late": {}, "extracted": {}, "official": {}}
    with Pool(workers=1, max_level=Level[max_level]) as pool:
        report["level"] = pool.level.name
        pool.judge(RIGHT, TESTS, entry_point="add")  # starts the judge
        for number, name, candidate, allowed in JUDGED:
            key = f"{number} {name}"
            judged, report["late"][key] = time_lateness(
                partial(pool.judge, candidate, TESTS, entry_point="add", limits=small), WALL_S
            )
            if judged.verdict == "timeout" and "timeout" not in allowed:  # a busy machine: only CPU time counts
                judged = pool.judge(candidate, TESTS, entry_point="add", limits=patient)
            report["judged"][key] = [judged.verdict, judged.message]
            report["unharmed"][key] = honest_job(pool, patient)
        for name, _, code, _ in EXTRACTED:
            if code is not None:
                report["extracted"][name] = pool.judge(code, TESTS, entry_point="add", limits=patient).verdict
        for program in OFFICIAL:
            report["official"][program] = pool.official(program, Limits(cpu_s=1.0))
    return report


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1])))
