"""The judge of the sandbox calls a candidate on tests, in a process that the candidate cannot reach."""
# ruff: noqa: E501  rows of tables

from collections.abc import Iterator
from dataclasses import replace

import pytest

from marl_ray.sandbox import Level, Limits, Pool, probe


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(workers=2) as pool:
        yield pool


JUDGED = {
    "right": ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
    "wrong": ("def f(x): return x", "assert f(1) == 2, 'off by one'", "fail:wrong"),
    "error": ("def f(x): return y", "assert f(1) == 2", "fail:error"),
    "expected error": ("def f(x): raise ValueError('no')", "try: f(1)\nexcept ValueError as e: assert str(e) == 'no'", "passed"),
    "own error class": ("class E(KeyError): pass\ndef f(x): raise E(x)", "try: f(1)\nexcept KeyError: pass", "passed"),
    "missing": ("def g(x): return 2", "assert f(1) == 2", "fail:error"),
    "syntax": ("def f(x: return 2", "assert f(1) == 2", "fail:error"),
    "in place": ("def f(x):\n    x.sort()\n    x[0].append(9)", "x = [[2], [1]]\ny = x[1]\nf(x)\nassert x == [[1, 9], [2]]", "passed"),
    "keywords": ("def f(x, *, y): y.add(x)", "s = set()\nf(1, y=s)\nassert s == {1}", "passed"),
    "default kept": ("def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)", "f(1)\nassert f(1) == 2", "passed"),
    "types": ("def f(x): return x", "for v in (1, 1.5, 'a', b'b', (1, [2]), {1: {2}}, 1j, None): assert f(v) == v", "passed"),
    "function as argument": ("def f(g): return g(1)", "assert f(lambda x: x) == 1", "fail:nonbuiltin"),
    "function as result": ("def f(x): return lambda: x", "assert f(1)() == 1", "fail:nonbuiltin"),
    "tests forgive nothing": ("def f(x): return [].append", "try: f(1)\nexcept BaseException: pass", "fail:nonbuiltin"),
    "main block": ("def f(x): return 1\nif __name__ == '__main__': f = None", "assert f(0) == 1", "passed"),
    "helper of the prompt": ("def f(x): return helper(x)\ndef helper(x): return -x", "assert f(helper(1)) == 1", "passed"),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_candidates_are_judged(pool, name):
    candidate, tests, verdict = JUDGED[name]
    judged = pool.judge(candidate, tests, entry_point="f", setup="def helper(x): return -x")
    assert judged.verdict == verdict, judged.message
    assert judged.passed == (verdict == "passed")
    assert judged.level == pool.level


IN_PLACE = {
    "list": ("def f(x): x.sort()", "x = [2, 1]\nif x: f(x)\nassert x == [1, 2]"),
    "by name": ("def f(x, *, y): y.add(x)", "s = set()\nf(1, y=s)\nassert s == {1}"),
    "deque": ("def f(x): x.rotate(1)", "from collections import deque\nd = deque([1, 2, 3])\nf(d)\nassert [*d] == [3, 1, 2]"),
    "counter": ("def f(x): x['a'] += 1", "from collections import Counter\nc = Counter('ab')\nf(c)\nassert c['a'] == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_tests_see_changed_arguments_only_where_they_ask_for_them(pool, name):
    candidate, tests = IN_PLACE[name]
    for in_place in (None, True):
        assert pool.judge(candidate, tests, entry_point="f", in_place=in_place).passed
    assert pool.judge(candidate, tests, entry_point="f", in_place=False).verdict == "fail:wrong"


def test_a_candidate_cannot_empty_what_its_answer_is_compared_with(pool):
    tests = "x = [2, 1]\nassert f(x) == sorted(x)"
    assert pool.judge("def f(x):\n    x.clear()\n    return []", tests, entry_point="f").verdict == "fail:wrong"
    assert pool.judge("def f(x): return sorted(x)", tests, entry_point="f").passed
    alone = "x = [2, 1]\nif x: f(x)\nassert x == []\ny = [1, 2]\nfor _ in y: f(*[y])\nassert y == []"
    emptied = "def f(x):\n    x.clear()\n    return []"
    assert pool.judge(emptied, alone, entry_point="f").passed
    assert pool.judge(emptied, f"{alone}\n{tests}", entry_point="f").verdict == "fail:wrong"


def test_tests_that_do_not_end_are_a_timeout(pool):
    judged = pool.judge("def f(x): return x", "while f(1): pass", entry_point="f", limits=Limits(wall_s=0.5))
    assert judged.verdict == "timeout"
    judged = pool.judge("def f(x): return x", "f(1)\nwhile True: pass", entry_point="f", limits=Limits(wall_s=0.5))
    assert judged.verdict == "timeout"
    assert pool.judge("def f(x): return x", "assert f(1)", entry_point="f").passed


def test_tests_have_limits_of_their_own(pool):
    limits = Limits(cpu_s=0.2, wall_s=20, memory_bytes=128 << 20)
    judged = pool.judge("def f(x): return x", "f(1)\nwhile True: pass", entry_point="f", limits=limits)
    assert judged.verdict == "timeout" and judged.wall_s < 5
    slow = replace(limits, cpu_s=5.0)  # to fill the memory takes its time where others work too
    for candidate, tests in (
        ("def f(x): return x", "x = [f(1)]\nwhile True: x += x"),
        ("def f(x): return [range(10**6)] * 100", "[list(item) for item in f(1)]"),
    ):
        assert pool.judge(candidate, tests, entry_point="f", limits=slow).verdict == "oom"
    assert pool.judge("def f(x): return x", "assert f(1) == 1", entry_point="f", limits=limits).passed


@pytest.mark.skipif(probe() < Level.NAMESPACES, reason="the host counts processes and files")
def test_no_run_can_count_what_those_before_it_did():
    world = "import os\nopen('x', 'w')\nprint(os.getpid(), os.stat('x').st_ino, os.stat('.').st_ino)"
    busy = "import os, threading\nfor n in range(99): open(f'{n}', 'w'); t = threading.Thread(target=int); t.start(); t.join()"
    with Pool(workers=1) as pool:
        first = pool.run(world).stdout
        assert pool.run(busy, limits=Limits(open_files=200)).returncode == 0
        assert pool.run(world).stdout == first


def test_what_a_run_leaves_in_the_judge_is_no_later_run_s_affair():
    limits = Limits(memory_bytes=160 << 20)
    keeps = "def g(): pass\nx = f(1)\nassert len(x) == 1"
    with Pool(workers=1) as pool:
        for items in (1_400_000, 1_000_000, 600_000):
            large = f"def f(x): return [1000 + n % 5000 for n in range({items})]"
            assert pool.judge(large, keeps, entry_point="f", limits=limits).verdict == "fail:wrong"
        tests = "x = list(range(1000, 800_000))\nassert f(x) == x"
        assert pool.judge("def f(x): return x", tests, entry_point="f", limits=limits).passed
        names = "signal.SIGALRM, signal.SIGPROF"
        tests = f"import signal\nfor n in ({names}): signal.signal(n, print)\nf(1)"
        assert pool.judge("def f(x): exit()", tests, entry_point="f").verdict == "fail:exit"
        tests = f"import signal\nassert all(signal.getsignal(n) == signal.SIG_DFL for n in ({names}))"
        assert pool.judge("def f(x): return x", tests, entry_point="f").passed


def test_tests_may_write_to_both_outputs(pool):
    tests = "import sys\nprint('x' * 99_999, file=sys.stderr, flush=True)\nprint('x', flush=True)\nassert f(1) == 1"
    for _ in range(2):
        assert pool.judge("def f(x): return x", tests, entry_point="f").passed


def test_a_forged_change_of_an_argument_is_malformed(pool):
    forged = b'{"value":3,"changed":{"0":[]}}'
    candidate = (
        f"import os\nos.write(3, b'\\x0e\\0\\0\\0{{\"value\":null}}\\x1e\\0\\0\\0' + {forged!r})\ndef f(a): return 0"
    )
    assert pool.judge(candidate, "f(1)", entry_point="f").verdict == "fail:encode"
    assert pool.judge(candidate, "assert f(1) == 3", entry_point="f").passed  # its word, which nobody needs to change


def test_a_stop_iteration_ends_no_loop_of_the_tests(pool):
    for name in ("StopIteration", "StopAsyncIteration"):
        judged = pool.judge(
            f"def f(x): raise {name}", "for a, b in zip(map(f, [1]), [2]): assert a == b", entry_point="f"
        )
        assert judged.verdict == "fail:error" and judged.message.startswith("RuntimeError")


def test_tests_with_lone_surrogates_do_not_end_the_judge(pool):
    candidate = "def f(x): return x"
    judged = pool.judge(candidate, "assert f('\ud800') == '\ud800'", entry_point="f")
    assert judged.verdict == "fail:error" and "surrogates" in judged.message  # source code cannot have them
    assert pool.judge(candidate, "assert f(1) == 1", entry_point="f").passed
