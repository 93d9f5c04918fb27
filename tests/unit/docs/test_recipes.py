"""The recipes name every shipped config."""

from docs.pages import ROOT


def test_every_shipped_config_is_a_recipe() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    assert [path.stem for path in (ROOT / "jobs/configs").glob("*.yaml") if f"`{path.stem}`" not in text] == []
