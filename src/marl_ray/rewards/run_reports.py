"""The report of a run in which the judge's program runs many tests of one function.

The program raises its report at its end, as the text of an AssertionError, which is all that leaves the sandbox.
"""

import json
import secrets

from marl_ray.json_types import JsonValue
from marl_ray.sandbox import Judgement

REPORT_MARK = secrets.token_hex(16)
"""Begins a report. The function under test cannot know it, so nothing that it raises passes for a report."""
LOADING_VERDICTS = ("fail:error", "fail:wrong")
"""Verdicts without a report that only what runs before the tests can cause: each test's own exceptions are caught."""


def read_report(judgement: Judgement) -> JsonValue:
    """Return the plain data that the judge's program has reported; None if its run ended otherwise."""
    if judgement.verdict != "fail:wrong" or not judgement.message.startswith(REPORT_MARK):
        return None
    return json.loads(judgement.message.removeprefix(REPORT_MARK))
