"""Files of manifests: what is refused of them before any rule is looked at."""

import pytest

from marl_ray.cluster.lint.documents import read_documents
from marl_ray.errors import MarlRayError


def test_files_that_are_no_yaml_are_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n---\nb: [\n")
    with pytest.raises(
        MarlRayError, match=r"/x\.yaml: not valid YAML at line 4: expected the node content, but found '<stream end>'$"
    ):
        read_documents(path)
    with pytest.raises(MarlRayError, match=r"/none\.yaml' cannot be read: No such file or directory$"):
        read_documents(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["a: !!binary aGVsbG8=", "a: !!set {b}", "a: .nan", "a: &a [*a]"])
def test_what_json_cannot_hold_is_refused(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(MarlRayError, match=r"x\.yaml: expected what JSON can hold: ") as caught:
        read_documents(path)
    assert "\n" not in str(caught.value)
