"""A file of API keys that is none: one line that names the file and the key, and shows no secret."""

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.serving.http.keys import Keys

SECRET = "correct-horse-battery-staple"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "keys: expected a length of at least 1"),
        ("{}", "missing key 'keys'"),
        ("keys: [{name: a, scopes: [read]}]", "missing key 'keys.0.sha256'"),
        (
            f"keys: [{{name: a, secret: {SECRET}}}]",
            "unknown key 'keys.0.secret'; did you mean keys.0.scopes? (and 2 more)",
        ),
        (
            f"keys: [{{name: a, sha256: {SECRET}, scopes: [read]}}]",
            "keys.0.sha256: expected a text that matches ^[0-9a-f]{64}$",
        ),
    ],
)
def test_a_mistake_in_the_file_of_keys_names_the_key_and_shows_no_secret(tmp_path, text, message):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(MarlRayError) as caught:
        Keys(str(path))
    assert str(caught.value).startswith(f"api_keys: {str(path)!r}: {message}")
    assert SECRET not in str(caught.value)
