"""Style of a program, measured by ruff.

A program gains nothing by hiding code in a text that it hands to `exec`, `eval` or `compile`. If the text is written
there, it is checked as a program of its own: its violations count, and so does the call. If it is not, or if the
program reaches such a call another way (another name for it, one behind a dot, `builtins`, `globals`, `importlib`,
`runpy`), the program cannot be checked. The check reads names, so it does not see one that is put together as the
program runs, such as `getattr(module, "ev" + "al")`, nor code that another process runs.
"""

import ast
import io
import json
import re
import subprocess
import tokenize
from collections.abc import Sequence

from marl_ray.errors import MarlRayError, install_hint, one_line

RULES = ("E4", "E7", "E9", "F", "B", "C4", "SIM", "UP", "C901", "PLR0911", "PLR0912")
"""The pinned rule set: part of the reward's definition. No naming rules: the task names the function."""
TIMEOUT_S = 10.0
"""Seconds that ruff may take for one text; it usually takes a few hundredths."""
MAX_BYTES = 1 << 17
"""Size of the largest program that is checked: a parser may need thousands of times as much memory."""
TEXT_RUNNERS = {"exec", "eval", "compile"}
PATTERN_MODULES = {"re", "regex"}
"""Modules whose `compile` makes a pattern."""
UNREADABLE_NAMES = {
    "builtins", "__builtins__", "__import__", "importlib", "runpy", "codeop", "timeit", "cProfile", "pdb", "bdb", "doctest",
}  # fmt: skip
"""Names by which a program can run text unseen."""
NAMESPACES = {"globals", "locals", "vars", "__dict__", "__globals__"}
"""Names that give all names of a module, also those above, by a subscript."""
MAX_TEXTS, MAX_DEPTH = 16, 3
"""Maximum number of texts that a program runs, those in texts included, and of such texts in each other; each takes a run of
ruff, as the program itself does."""
_HIDING_STRING = re.compile(
    rf"builtins|^[rR]?[fF].*\b(?:(?:{'|'.join(sorted(TEXT_RUNNERS | UNREADABLE_NAMES))})\b"
    rf"|(?:{'|'.join(sorted(NAMESPACES))})(?:(?<=__)|\s*\())",
    re.DOTALL,
)
"""Strings that name the module, or hold a call inside an f-string, which is one token."""


def count_violations(code: str) -> int | None:
    """Return the number of rule violations of a program and the texts that it runs.

    Returns None if it cannot be checked: it is no Python, too large or too slow, or runs text that is not written in
    it. No configuration file is read and `noqa` is ignored, so nothing but the code itself changes the result. Raises
    MarlRayError if ruff is not installed.
    """
    total, waiting = 0, [(code, 0)]
    text_count = 0
    while waiting:
        text, depth = waiting.pop()
        count = _count_in_text(text)
        texts = None if count is None else texts_to_run(text)
        if count is None or texts is None or (texts and depth == MAX_DEPTH):
            return None
        text_count += len(texts)
        if text_count > MAX_TEXTS:
            return None
        total += count + len(texts)
        waiting += [(inner, depth + 1) for inner in texts]
    return total


def texts_to_run(code: str) -> list[str] | None:
    """Return the texts that a program hands to `exec`, `eval` and `compile`; None if one of them cannot be read there.

    The program is divided into tokens, not parsed: it comes from a policy and may be made to crash a parser.
    """
    texts: list[str] = []
    try:
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(code).readline)
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        ]
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None
    for place, token in enumerate(tokens):
        if token.string in UNREADABLE_NAMES or (token.type == tokenize.STRING and _HIDING_STRING.search(token.string)):
            return None
        if token.type != tokenize.NAME:
            continue
        if token.string in NAMESPACES:
            return None
        if token.string not in TEXT_RUNNERS:
            continue
        if place and tokens[place - 1].string == ".":
            if not _is_method(tokens, place):
                return None
            continue
        text = _first_argument(tokens[place + 1 :])
        if text is None or len(texts) == MAX_TEXTS:
            return None
        texts.append(text)
    return texts


def _is_method(tokens: Sequence[tokenize.TokenInfo], place: int) -> bool:
    """Return True if the name behind a dot at this place can run no text.

    Such are `re.compile`, and a method that is called without arguments, as `eval` of a module of torch is.
    """
    before = [token.string for token in tokens[max(0, place - 3) : place - 1]]
    if tokens[place].string == "compile" and before and before[-1] in PATTERN_MODULES:
        return before[0] != "."
    return [token.string for token in tokens[place + 1 : place + 3]] == ["(", ")"]


def _first_argument(tokens: Sequence[tokenize.TokenInfo]) -> str | None:
    """Return the text that is the first argument of a call, from its `(` on; None if the argument is no plain string."""
    if not tokens or tokens[0].string != "(":
        return None
    parts = []
    for token in tokens[1:]:
        if token.type != tokenize.STRING:
            break
        parts.append(token.string)
    end = tokens[1 + len(parts)].string if len(tokens) > 1 + len(parts) else ""
    if not parts or end not in (",", ")"):
        return None
    try:
        values = [ast.literal_eval(part) for part in parts]  # one string each
    except (SyntaxError, ValueError):
        return None  # an f-string
    return "".join(values) if all(isinstance(value, str) for value in values) else None


def _count_in_text(code: str) -> int | None:
    """Return the number of rule violations of one text; None if it cannot be checked."""
    data = code.encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        return None
    command = [_find_ruff(), "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet"]
    command += ["--target-version", "py311", "--select", ",".join(RULES), "--output-format", "json", "--statistics"]
    try:
        command += ["--stdin-filename", "solution.py", "-"]
        result = subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if result.returncode != 0:
        return None
    statistics = json.loads(result.stdout or b"[]")  # a clean program has no statistics
    broken = any(item["code"] in (None, "invalid-syntax") for item in statistics)
    return None if broken else sum(item["count"] for item in statistics)


def style(code: str) -> float:
    """Return 1 / (1 + violations): 1 for a clean program, 0 for one that cannot be checked.

    The number of violations counts and not their density, so that no padding makes a program look cleaner.
    """
    count = count_violations(code)
    return 0.0 if count is None else 1 / (1 + count)


def _find_ruff() -> str:
    try:
        import ruff
    except ImportError as error:
        raise MarlRayError(f"style: needs ruff; {install_hint('rewards')}, or set its weight to 0") from error
    try:
        return str(ruff.find_ruff_bin())
    except FileNotFoundError as error:
        raise MarlRayError(f"style: ruff has no binary here: {one_line(error)}") from error
