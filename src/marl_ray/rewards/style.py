"""How clean a program is, by ruff."""

import json
import subprocess

from marl_ray.errors import MarlRayError, one_line

RULES = ("E4", "E7", "E9", "F", "B", "C4", "SIM", "UP", "C901", "PLR0911", "PLR0912")
"""The pinned rule set: part of the reward's definition. No naming rules: the task names the function."""
TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20


def violations(code: str) -> int | None:
    """How often the program breaks a rule; None where it cannot be checked (no Python, too large, too slow).

    No configuration file is read and `noqa` is ignored, so nothing but the code itself changes the result.
    Raises MarlRayError where ruff is not installed.
    """
    data = code.encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        return None
    command = [_ruff(), "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet"]
    command += ["--target-version", "py311", "--select", ",".join(RULES), "--output-format", "json"]
    try:
        done = subprocess.run(
            [*command, "--stdin-filename", "solution.py", "-"], input=data, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout)
    broken = any(item["code"] in (None, "invalid-syntax") for item in found)
    return None if broken else len(found)


def style(code: str) -> float:
    """1 / (1 + violations): 1 for a clean program, 0 for one that cannot be checked.

    By number and not by density, so that no padding makes a program look cleaner.
    """
    count = violations(code)
    return 0.0 if count is None else 1 / (1 + count)


def _ruff() -> str:
    try:
        import ruff
    except ImportError as error:
        raise MarlRayError("style: needs ruff; install marl-ray[rewards] or set its weight to 0") from error
    try:
        return ruff.find_ruff_bin()
    except FileNotFoundError as error:
        raise MarlRayError(f"style: ruff has no binary here: {one_line(error)}") from error
