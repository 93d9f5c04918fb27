"""The page of config keys is what the configs say, and it leaves no key unexplained."""

from pathlib import Path

import pytest

from marl_ray.config.reference import CONFIGS, key_rows, reference_page

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_stored_page_is_what_the_configs_say():
    assert PAGE.read_text() == reference_page(), "run: .venv/bin/marl-ray config reference > docs/config.md"


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_key_has_a_meaning(kind):
    assert [row.key for row in key_rows(kind) if not row.description] == []


def test_a_row_says_type_default_and_meaning():
    rows = {row.key: row for kind in ("run", "sweep", "cluster") for row in key_rows(kind)}
    assert rows["hyper.adam_betas"].type == "[number ≥ 0 and < 1, number ≥ 0 and < 1]"
    assert rows["hyper.adam_betas"].default == "`[0.9, 0.999]`"
    assert rows["team.NAME.model.lora.rank"][1:3] == ("integer > 0", "`16`")
    assert (rows["warm_start"].type, rows["warm_start"].default) == ("group or null", "`null`")
    assert rows["env.id"].default == rows["groups"].default == "required"
    assert rows["scheduler.reduction"].description.startswith("`kind: asha`. One of this many")
    assert rows["groups.NAME.spot"].type == "boolean"
