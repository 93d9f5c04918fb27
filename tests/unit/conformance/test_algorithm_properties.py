"""The statements of the algorithm checks are whole sentences."""

import re

from marl_ray.conformance.algorithm.properties import PROPERTIES


def test_the_report_says_each_property_in_one_whole_sentence():
    texts = [each.text for each in PROPERTIES]
    assert [text for text in texts if not re.fullmatch(r"[^.]+\.", text)] == []
    assert "a violation counts per decision, also in batches in which no episode ends." in texts
