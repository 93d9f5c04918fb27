"""Programs that mean no harm: idioms of the standard library run, and answers of many types are judged, at every level."""
# ruff: noqa: E501  rows of tables

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from marl_ray.sandbox import Level, Limits, Pool, Status

STDOUT = Path("/dev/stdout")
"""A link to /proc/self/fd/1, unless something on this host has replaced it."""
STDOUT_BY_NAME = "standard output by name"
SCRIPTS = {
    "decimal": "from decimal import Decimal, getcontext\ngetcontext().prec = 50\nprint(Decimal(2).sqrt())",
    "fractions": "from fractions import Fraction\nprint(sum(Fraction(1, n) for n in range(1, 9)))",
    "datetime": "from datetime import datetime, timedelta\nprint(datetime(2020, 2, 28) + timedelta(days=2), datetime.now().year > 2000)",
    "zoneinfo": "from zoneinfo import ZoneInfo\nfrom datetime import datetime\nprint(datetime(2020, 7, 1, tzinfo=ZoneInfo('UTC')))",
    "calendar": "import calendar, locale\nprint(calendar.month(2020, 2))",
    "locale": "import locale\nprint(locale.setlocale(locale.LC_ALL, 'C.UTF-8'), locale.setlocale(locale.LC_ALL, ''), f'{12345.6:n}')",
    "re": "import re\nprint([m.span() for m in re.finditer(r'(?P<a>b+)', 'abbabb')])",
    "collections": "from collections import *\nprint(Counter('abca').most_common(1), deque([1], 2), ChainMap({1: 2})[1])",
    "heapq and bisect": "import bisect, heapq\nh = [3, 1]\nheapq.heapify(h)\nbisect.insort(h, 2)\nprint(h)",
    "cache": "from functools import cache, reduce, partial\n@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f(300))",
    "itertools": "from itertools import *\nprint(*islice(cycle(accumulate(permutations('ab'))), 3))",
    "dataclasses": "from dataclasses import *\n@dataclass(order=True)\nclass A:\n    x: int = field(default=1)\nprint(sorted([A(2), A()]), asdict(A()))",
    "enum": "from enum import *\nclass E(Enum):\n    A = auto()\nprint(E.A, E(1), list(E))",
    "typing and abc": "import abc\nfrom typing import *\nT = TypeVar('T')\nclass A(Generic[T], abc.ABC): pass\nprint(A[int])",
    "recursion": "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 << 20)\ndef f(n): return n and 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()",
    "threads": "import threading, queue\nq = queue.Queue()\nt = [threading.Thread(target=q.put, args=(n,)) for n in range(9)]\n[x.start() for x in t]\n[x.join() for x in t]\nprint(sum(q.get() for _ in t))",
    "thread pool executor": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(*p.map(abs, range(-9, 0)))",
    "thread pool": "from multiprocessing.pool import ThreadPool\nwith ThreadPool(3) as p: print(p.map(abs, range(-9, 0)), p.apply_async(len, ('ab',)).get(5))",
    "dummy pool": "from multiprocessing.dummy import Pool\nwith Pool(2) as p: print(p.starmap(pow, [(2, 3), (3, 2)]))",
    "semaphores of multiprocessing": "import multiprocessing as m, threading\ns = m.Semaphore(2)\nwith s, m.Lock(), m.RLock() as l: print(s.get_value())\ne = m.Event()\nthreading.Timer(0.01, e.set).start()\nprint(e.wait(5), m.Lock().acquire(timeout=1))\nb = m.BoundedSemaphore(1)\ntry: b.release()\nexcept ValueError as x: print('bound')",
    "queue of multiprocessing": "import multiprocessing as m\nq = m.SimpleQueue()\nq.put({1: [2]})\nprint(q.get())",
    "asyncio": "import asyncio\nasync def f(n):\n    await asyncio.sleep(0.001 * n)\n    return n\nasync def g():\n    async with asyncio.timeout(5): print(await asyncio.gather(*map(f, range(5))), await asyncio.to_thread(f.__name__.upper))\nasyncio.run(g())",
    "temporary files": "import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n    p = os.path.join(d, 'x')\n    open(p, 'w').write('y')\n    print(open(p).read())\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('z')\n    f.seek(0)\n    print(f.read())",
    "own files": "with open('f.txt', 'w') as f: f.write('a\\nb')\nwith open('f.txt', 'a') as f: print(f.tell())\nprint([*open('f.txt')])",
    "pathlib": "from pathlib import Path\nPath('a').mkdir()\nPath('a/b').touch()\nPath('a/b').touch()\nPath('a/b').rename('a/c')\nprint(*Path('.').rglob('*'), Path('a/c').stat().st_size, Path.cwd() == Path().resolve())",
    "file locks": "import fcntl\nwith open('f', 'w') as f:\n    fcntl.flock(f, fcntl.LOCK_EX)\n    fcntl.lockf(f, fcntl.LOCK_EX)\n    fcntl.flock(f, fcntl.LOCK_UN)\nprint('locked')",
    "fsync": "import os\nwith open('f', 'w') as f:\n    f.write('x')\n    f.flush()\n    os.fsync(f.fileno())\nprint(os.path.getsize('f'))",
    "fallocate": "import os\nf = os.open('f', os.O_CREAT | os.O_RDWR)\nos.posix_fallocate(f, 0, 5000)\nprint(os.fstat(f).st_size)",
    "shutil": "import shutil\nopen('a', 'w').write('x')\nshutil.copyfile('a', 'b')\nshutil.move('b', 'c')\nprint(open('c').read(), shutil.disk_usage('.').total > 0)",
    "sqlite": "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t (a)')\nc.execute('insert into t values (1)')\nc.commit()\nprint(c.execute('select * from t').fetchall())",
    "csv and json": "import csv, io, json\nprint(json.dumps(list(csv.reader(io.StringIO('a,b\\n1,2')))))",
    "pickle": "import copy, pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), copy.deepcopy({1: [2]}))",
    "compression": "import bz2, gzip, lzma, zipfile, zlib\nprint(gzip.decompress(gzip.compress(b'x')), lzma.decompress(lzma.compress(b'y')), zlib.crc32(b'z'), bz2.compress(b'')[:2])\nwith zipfile.ZipFile('z', 'w') as z: z.writestr('a', 'b')\nprint(zipfile.ZipFile('z').namelist())",
    "hashlib": "import hashlib, hmac\nprint(hashlib.sha256(b'x').hexdigest()[:8], hmac.new(b'k', b'm', 'md5').hexdigest()[:8])",
    "random": "import random\nrandom.seed(1)\nprint(random.random(), random.sample(range(9), 3), random.SystemRandom().random() < 1)",
    "secrets and uuid": "import secrets, uuid\nprint(len(secrets.token_hex(4)), uuid.uuid4().version, uuid.uuid5(uuid.NAMESPACE_DNS, 'a'))",
    "time": "import time\nt = time.perf_counter()\ntime.sleep(0.01)\nprint(time.perf_counter() - t >= 0.01, time.strftime('%Y') > '2000', time.process_time() > 0)",
    "signals": "import signal, os, time\nsignal.signal(signal.SIGALRM, lambda *a: print('alarm'))\nsignal.alarm(1)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(0.05)\nsignal.signal(signal.SIGUSR1, lambda *a: print('usr'))\nos.kill(os.getpid(), signal.SIGUSR1)",
    "statistics and math": "import cmath, math, statistics\nprint(statistics.stdev([1, 2, 4]), math.comb(50, 25), cmath.sqrt(-1))",
    "string and textwrap": "import string, textwrap, difflib\nprint(string.Template('$a').substitute(a=1), textwrap.fill('a b c', 3), difflib.get_close_matches('ab', ['abc']))",
    "contextlib": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: print('x')\nprint(s.getvalue())",
    "argparse and logging": "import argparse, logging, sys\nlogging.basicConfig(stream=sys.stdout)\nlogging.warning('w')\nprint(argparse.ArgumentParser().parse_args([]))",
    "unittest": "import sys, unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\nunittest.main(argv=['x'], exit=False, testRunner=unittest.TextTestRunner(stream=sys.stdout, verbosity=0).__class__(open('log', 'w')))\nprint('done')",
    "doctest": "import doctest\ndef f():\n    '''\n    >>> f()\n    1\n    '''\n    return 1\nprint(doctest.testmod())",
    "inspect and ast": "import ast, inspect\nprint(ast.dump(ast.parse('1')), inspect.signature(lambda a, *b: 0))",
    "xml and html": "import html, xml.etree.ElementTree as E\nprint(E.fromstring('<a><b/></a>')[0].tag, html.escape('<'))",
    "urllib": "from urllib.parse import *\nprint(urlparse('http://a/b?c=d').query, quote(' '))",
    "weak references": "import gc, weakref\nclass A: pass\na = A()\nr = weakref.ref(a)\ndel a\ngc.collect()\nprint(r())",
    "tracemalloc and resource": "import resource, tracemalloc\ntracemalloc.start()\nprint(tracemalloc.get_traced_memory()[0] >= 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)",
    "mmap": "import mmap\nopen('f', 'wb').write(b'abc')\nwith open('f', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n    m[0] = 65\n    m.flush()\n    print(m[:])",
    "pipes": "import os, select\nr, w = os.pipe()\nos.write(w, b'x')\nprint(select.select([r], [], [], 5)[0] == [r], os.read(r, 1))",
    "socket pair": "import socket\na, b = socket.socketpair()\na.sendall(b'x')\nprint(b.recv(1))",
    "standard input by name": "print(open('/dev/stdin').read().split())",
    "standard input by number": "print(open(0).read().split())",
    "standard input as binary": "import sys\nprint(sys.stdin.buffer.readline(), [*map(int, sys.stdin)])",
    STDOUT_BY_NAME: "print('a', flush=True)\nopen('/dev/stdout', 'a').write('b\\n')",
    "ctypes": "import ctypes\nprint(ctypes.c_int32(1 << 31).value, ctypes.sizeof(ctypes.c_long))",
    "environment": "import os\nos.environ['A'] = 'b'\nprint(os.getenv('A'), os.path.expandvars('$A'))",
    "platform": "import platform, sys\nprint(platform.system(), sys.version_info >= (3, 11))",
    "warnings": "import sys, warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    warnings.warn('x')\nprint(len(w))",
    "long ints": "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(3**20000)))",
    "exit in a thread": "import threading, sys\nt = threading.Thread(target=sys.exit)\nt.start()\nt.join()\nprint('on')",
}  # fmt: skip
if not (STDOUT.is_symlink() and STDOUT.readlink().parts[-2:] == ("fd", "1")):
    del SCRIPTS[STDOUT_BY_NAME]  # a file in the link's place takes what the script prints, outside of the sandbox too
REFUSED = {
    "subprocess": "import subprocess\ntry: subprocess.run(['true'])\nexcept PermissionError as error: print(error.errno)",
    "process": "import multiprocessing as m\ntry: m.Process(target=print).start()\nexcept PermissionError as error: print(error.errno)",
    "system": "import os\nprint(os.system('true') != 0)",
    "socket": "import urllib.request\ntry: urllib.request.urlopen('http://127.0.0.1:1')\nexcept OSError as error: print(error.reason.errno)",
}
"""Errors of what a run may not do are in Python's own words."""

ANSWERS = {
    "generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
    "generator without an end": ("def f(n):\n    while True:\n        yield n\n        n += 1", "from itertools import islice\nassert list(islice(f(3), 1000))[-1] == 1002"),
    "generator once": ("def f(n): return (i for i in range(n))", "g = f(3)\nassert sum(g) == 3 and sum(g) == 0"),
    "generator that fails": ("def f(n):\n    yield n\n    raise KeyError(n)", "g = f(3)\nassert next(g) == 3\ntry: next(g)\nexcept KeyError as e: assert e.args == (3,)\nelse: assert False"),
    "map of lists": ("def f(n): return map(lambda i: [i], range(n))", "assert list(f(2)) == [[0], [1]]"),
    "iterators inside": ("def f(n): return {'a': iter([1, 2]), 'b': zip([1], [2])}", "x = f(1)\nassert list(x['b']) == [(1, 2)] and list(x['a']) == [1, 2]"),
    "itertools": ("import itertools\ndef f(n): return itertools.permutations(range(n))", "assert len(list(f(6))) == 720"),
    "many items": ("def f(n): return (i for i in range(n))", "assert sum(f(50_000)) == 50_000 * 49_999 // 2"),
    "iterator as argument": ("def f(i): return sorted(i)", "assert f(x for x in (2, 1)) == [1, 2]\nassert f(map(abs, [-1])) == [1]"),
    "keys": ("def f(d): return d.keys()", "assert f({1: 2}) == {1} and list(f({3: 1})) == [3]"),
    "values and items": ("def f(d): return d.values(), d.items()", "v, i = f({1: [2]})\nassert list(v) == [[2]] and list(i) == [(1, [2])]"),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, y=2)", "p = f(1)\nassert p == (1, 2) and p.x == 1 and p._fields == ('x', 'y')"),
    "typed named tuple": ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(n): return [P(n)]", "assert f(3)[0].x == 3"),
    "deque": ("from collections import deque\ndef f(n): return deque(range(n), maxlen=2)", "from collections import deque\nassert f(4) == deque([2, 3]) and f(4).maxlen == 2"),
    "counter": ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab').most_common(1) == [('a', 2)] and f('a')['x'] == 0"),
    "defaultdict": ("from collections import defaultdict\ndef f(s): return defaultdict(list, a=[1])", "assert f(1)['b'] == [] and f(1) == {'a': [1]}"),
    "decimal": ("from decimal import Decimal\ndef f(s): return Decimal(s) * 2", "from decimal import Decimal\nassert f('1.10') == Decimal('2.20')"),
    "fraction": ("from fractions import Fraction\ndef f(a, b): return Fraction(a, b)", "from fractions import Fraction\nassert f(2, 4) == Fraction(1, 2)"),
    "dates": ("from datetime import date, timedelta\ndef f(d): return d + timedelta(1)", "from datetime import date\nassert f(date(2020, 2, 28)) == date(2020, 2, 29)"),
    "types": ("def f(x, t): return [type(i) for i in x if type(i) is t]", "assert f([1, 'a'], str) == [str]"),
    "unicode error": ("def f(b): return b.decode()", "try: f(b'\\xff')\nexcept UnicodeDecodeError as e: assert e.start == 0\nelse: assert False"),
    "import error": ("def f(n): import nothing_of_the_kind", "try: f(1)\nexcept ImportError: pass\nelse: assert False"),
    "key error": ("def f(n): return {}[n]", "try: f('a')\nexcept KeyError as e: assert str(e) == \"'a'\"\nelse: assert False"),
    "eight megabytes": ("def f(n): return ' '.join(map(str, range(n + 1)))", "assert len(f(1_000_000)) == 6888897"),
    "a list of a million": ("def f(n): return list(range(n))", "assert f(1_000_000)[-1] == 999_999"),
}  # fmt: skip
STDIN = b"1\n2\n3\n"


@pytest.fixture(scope="module", params=[*Level], ids=lambda level: level.name)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(workers=1, min_level=Level.LIMITS, max_level=request.param) as pool:
        if pool.level < request.param:
            pytest.skip(f"this host allows only {pool.level.name}")
        yield pool


@pytest.fixture(scope="module")
def expected() -> dict[str, bytes]:
    """The prints of the scripts outside of the sandbox: each script in its own folder."""
    with tempfile.TemporaryDirectory() as folder:
        printed = {}
        for name, script in SCRIPTS.items():
            run_folder = tempfile.mkdtemp(dir=folder)
            with tempfile.TemporaryFile() as stdin:
                stdin.write(STDIN)
                stdin.seek(0)
                done = subprocess.run(
                    [sys.executable, "-S", "-c", script],
                    stdin=stdin,
                    capture_output=True,
                    timeout=60,
                    cwd=run_folder,
                    env=ENVIRONMENT,
                )
            printed[name] = done.stdout
        return printed


ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}


def test_honest_programs_run_as_outside(pool, expected):
    for name, script in SCRIPTS.items():
        ran = pool.run(script, stdin=STDIN, limits=Limits(cpu_s=5, stack_bytes=None))
        assert ran.status == Status.OK, (name, ran.stderr[-500:])
        assert ran.stdout == expected[name] != b"", (name, ran.stdout, ran.stderr[-500:])


def test_what_is_refused_is_refused_in_pythons_words(pool):
    for name, script in REFUSED.items():
        ran = pool.run(script, limits=Limits(cpu_s=5))
        assert ran.stdout in (b"1\n", b"True\n"), (name, ran.stdout, ran.stderr[-500:])


def test_honest_answers_are_judged(pool):
    for name, (candidate, tests) in ANSWERS.items():
        judged = pool.judge(candidate, tests, entry_point="f", limits=Limits(cpu_s=5))
        assert judged.passed, (name, judged.verdict, judged.message)
