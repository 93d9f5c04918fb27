"""The blocks of the pages: each has a language, each config is one, and nothing is skipped without a reason."""

import json
import re

import pytest
import yaml
from docs.pages import LANGUAGES, PAGES, REASONS, ROOT, blocks, page_before, prose
from pydantic import ValidationError

from marl_ray.config import ExperimentConfig, GatewayConfig, RunConfig, read_yaml
from marl_ray.config.base import Config
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.load import YamlLoader
from marl_ray.config.sweep import SweepConfig

KINDS: list[type[Config]] = [RunConfig, SweepConfig, ExperimentConfig, GatewayConfig, ClusterConfig]
OTHERS = [{"keys"}, set(yaml.safe_load((ROOT / "helm/marl-ray/values.yaml").read_text()))]
"""Top keys of files that no kind of config describes: of keys, and of the chart's values."""
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_is_fenced_and_has_a_language(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: expected one of {sorted(LANGUAGES)}"
        assert all(mark.split(",")[0].split()[0] in {"skip", "serve", "with", "fails", "after"} for mark in block.marks)
    before = ""
    for number, line in prose(page):
        indented = re.match(r" {4,}\S", line) and not before.strip()
        assert not indented, f"{page.name}:{number}: expected a fenced block in the place of an indented one"
        before = line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_skipped_block_says_why(page):
    for block in blocks(page):
        assert block.skipped is None or block.skipped in REASONS, f"{block}: {block.skipped}"
    before = page_before(page)
    assert before is None or before in PAGES


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_data_are_valid_and_configs_fit(page):
    for block in blocks(page):
        if block.language == "json" and not block.is_output:
            for value in json_values(block.text):
                assert isinstance(value, dict | list), block
        if block.language == "yaml":
            assert fits(yaml.load(block.text, YamlLoader)), f"{block}: this is no part of a config"


def json_values(text: str) -> list[object]:
    """One value, or one a line, some of them over several lines."""
    decoder, values = json.JSONDecoder(), []
    while text.strip():
        value, end = decoder.raw_decode(text.strip())
        values.append(value)
        text = text.strip()[end:]
    return values


def fits(data: object) -> bool:
    """True if data are a config, or a part of one: nothing but missing keys is wrong."""
    if not isinstance(data, dict):
        return False
    if "applications" in data:
        return all(fits(application["args"]) for application in data["applications"])
    if isinstance(data.get("run"), str):  # a sweep's run is a file beside it
        places = [folder / data["run"] for folder in (ROOT, ROOT / "jobs/configs")]
        data = data | {"run": read_yaml(next(path for path in places if path.exists()))}
    return any(set(data) <= keys for keys in OTHERS) or any(mistakes(kind, data) <= {"missing"} for kind in KINDS)


def mistakes(kind: type[Config], data: object) -> set[str]:
    try:
        kind.model_validate(data)
    except ValidationError as error:
        return {mistake["type"] for mistake in error.errors()}
    return set()
