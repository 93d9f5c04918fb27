"""Runs a BigCodeBench problem inside the sandbox, as a program and not as a module to import.

stdin: a line with a number of bytes, so many bytes of JSON {"code", "test", "tests", "hardened"}, and a nonce to the end.
stdout: a line that begins with the nonce, behind which is the verdict as JSON {"passed", "message"}.

Tests and candidate share this interpreter, as mocks in the tests demand, so a candidate that knows this file can forge the
verdict. In hardened mode these guards stop candidates that do not know it: results are kept by a class made before the
candidate was loaded; unittest is put back as it was before every test, and a test that changed it fails; the number of
tests is known beforehand, and none may be skipped or expected to fail; the nonce is still unread while the candidate runs,
and stdout is somewhere else.
"""

import builtins
import contextlib
import fcntl
import io
import json
import os
import sys
import time
import types
import unittest
import unittest.case
import unittest.loader
import unittest.mock
import unittest.result
import unittest.suite
from collections.abc import Callable

MAX_NOTE = 300
"""Characters of the note on one failed test, so that a message has room for several."""
MAX_MESSAGE = 1000
"""Characters of the verdict's message, because results.jsonl keeps one for every sample."""
_PARTS: list[object] = [
    unittest,
    unittest.case,
    unittest.loader,
    unittest.result,
    unittest.suite,
    unittest.TestCase,
    unittest.TestResult,
    unittest.TestSuite,
    unittest.TestLoader,
    unittest.case._Outcome,  # type: ignore[attr-defined]
    unittest.case._AssertRaisesContext,
    unittest.mock.NonCallableMock,
]


class ClosedStream(io.StringIO):
    """A text stream that discards everything written and has nothing to read."""

    def read(self, *args: object, **kwargs: object) -> str:
        """Raise OSError, as `readline` and `readlines` do."""
        raise OSError

    readline = readlines = read  # type: ignore[assignment]

    def readable(self) -> bool:
        """Return False."""
        return False


def make_result(check: Callable[[], bool]) -> tuple[unittest.TestResult, dict[str, int], list[str]]:
    """Return a result whose counts live in a closure; `check` runs before and after every test."""
    counts = {"ran": 0, "passed": 0, "failed": 0}
    notes: list[str] = []

    class Result(unittest.TestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            check()
            counts["ran"] += 1

        def stopTest(self, test: unittest.TestCase) -> None:
            if check():
                counts["failed"] += 1
                notes.append("the test framework was changed")

        def addSuccess(self, test: unittest.TestCase) -> None:
            counts["passed"] += 1

        def _count_failure(self, test: object, *details: object) -> None:
            counts["failed"] += 1
            error = details[0] if details else None
            reason = f"{error[0].__name__}: {error[1]}" if isinstance(error, tuple) else "skipped, or unexpected"
            notes.append(f"{getattr(test, '_testMethodName', 'set-up')}: {reason}"[:MAX_NOTE])

        addError = addFailure = addSkip = addExpectedFailure = addUnexpectedSuccess = _count_failure  # type: ignore[assignment]

        def addSubTest(self, test: object, subtest: object, error: object) -> None:
            if error is not None:
                self._count_failure(test, error)

    return Result(), counts, notes


def snapshot() -> Callable[[], bool]:
    """Record the parts of unittest and return a function that restores them and returns True if they had changed."""
    before = [(part, dict(vars(part))) for part in _PARTS]
    setter, deleter, names = setattr, delattr, vars

    def restore() -> bool:
        changed = False
        for part, parts in before:
            now = dict(names(part))
            for name, value in parts.items():
                if name not in now or now[name] is not value:
                    if name.startswith("__") or name in ("_warn", "_testRunEntered"):
                        continue
                    setter(part, name, value)
                    changed = True
            for name, value in now.items():
                if name not in parts and not name.startswith("__") and not isinstance(value, types.ModuleType):
                    deleter(part, name)
                    changed = True
        return changed

    return restore


def main() -> None:
    """Read a job, run the candidate and its tests, write the verdict, and exit.

    Before the candidate is loaded, everything that must survive it is put out of its reach: the job is read to its last
    byte, stdout and the rest of stdin get other descriptors, and the functions that write the verdict are bound to names of
    this frame, so that a candidate that replaces `os.write` or `json.dumps` replaces nothing here.

    Official semantics are BigCodeBench's own: code and tests are one program, and the verdict is that of a plain
    result. In hardened mode code and tests run one after the other, with a look at unittest between them, and the
    verdict is that of `make_result`.
    """
    # The line is read byte by byte and the job by its size: a buffered reader would take the nonce behind them too.
    size, payload = b"", b""
    while not size.endswith(b"\n"):
        size += os.read(0, 1)
    while len(payload) < int(size):
        payload += os.read(0, int(size) - len(payload))
    job = json.loads(payload)
    # The verdict goes to the real stdout, under a number that the candidate is not told; what it prints goes to stderr. The
    # nonce stays unread in stdin, which moves to a number of 40 or more, out of the way of files that are opened later.
    verdict_out, rest_of_stdin = os.dup(1), fcntl.fcntl(0, fcntl.F_DUPFD, 40)
    os.dup2(2, 1)
    os.close(0)

    # BigCodeBench's own harness sets the time zone and removes `exit` and `quit` too.
    os.environ.update(TZ="UTC", OMP_NUM_THREADS="1")
    time.tzset()
    vars(builtins).update(exit=None, quit=None)
    module = types.ModuleType("__test__")
    module.__dict__.update(
        {"__builtins__": builtins, "__file__": "__test__.py", "__package__": None, "__doc__": None}
        | {"sys": sys, "os": os, "environ": os.environ}
    )
    # Names of this frame, which the candidate cannot replace as it can those of modules.
    hardened = job["hardened"]
    restore = snapshot() if hardened else (lambda: False)
    load, find = unittest.TestLoader().loadTestsFromTestCase, getattr
    result, counts, notes = make_result(restore)
    stream = ClosedStream()
    say, read, exit_now, max_message = os.write, os.read, os._exit, MAX_MESSAGE
    dumps = json.dumps
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            sys.stdin = stream
            if hardened:
                exec(compile(job["code"], "__test__.py", "exec"), module.__dict__)
                changed = restore()
                exec(compile("\n" + job["test"], "__test__.py", "exec"), module.__dict__)
                if changed or restore():
                    counts["failed"] += 1
                    notes.append("the test framework was changed")
            else:
                exec(compile(job["code"] + "\n" + job["test"], "__test__.py", "exec"), module.__dict__)
            sys.modules["__test__"] = module
            suite = load(find(module, "TestCases"))
            if hardened:
                suite.run(result)
                ok = counts["ran"] == counts["passed"] == job["tests"] and counts["failed"] == 0
                message = "; ".join(notes) or f"{counts['passed']} of {job['tests']} tests passed"
            else:
                plain = unittest.TestResult()
                suite.run(plain)
                issues = plain.failures + plain.errors
                ok, message = not issues, "; ".join(f"{test.id()}: {trace.splitlines()[-1]}" for test, trace in issues)
    except BaseException as error:
        # Also `sys.exit` of the candidate, which must not end this program without a verdict.
        ok, message = False, f"{type(error).__name__}: {error}"
    nonce = read(rest_of_stdin, 4096)
    text = b"\n" + nonce + dumps({"passed": bool(ok), "message": str(message)[:max_message]}).encode() + b"\n"
    while text:
        text = text[say(verdict_out, text) :]
    exit_now(0)  # without the candidate's handlers of `atexit`


if __name__ == "__main__":
    main()
