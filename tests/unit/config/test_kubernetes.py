"""Schedules, as the parser of KubeRay's operator takes them (robfig/cron v3, ParseStandard)."""

import pytest

from marl_ray.config.kubernetes import is_schedule

TAKEN = ["* * * * *", "*/5 0-6/2 1,15 JAN-mar mon", "? ? ? ? ?", "59 23 31 12 6", "5/15 * * * sun-fri", "0  3 * * *"]
REFUSED = [
    "", "daily", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *",
    "* * * * 7", "*/0 * * * *", "5-1 * * * *", "*-5 * * * *", "mon * * * *", "* * * mon *", "1, * * * *", "-1 * * * *",
    "CRON_TZ=UTC 0 3 * * *", "0 3 * * x", "٣ * * * *",
]  # fmt: skip


@pytest.mark.parametrize("text", TAKEN)
def test_a_schedule_of_five_fields_is_taken(text):
    assert is_schedule(text)


@pytest.mark.parametrize("text", REFUSED)
def test_any_other_text_is_no_schedule(text):
    assert not is_schedule(text)
