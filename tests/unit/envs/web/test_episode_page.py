"""The page of an episode, without a browser: what stands on it, and that no text makes an element."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from marl_ray.envs.web.browser.episode_page import episode_page


class Elements(HTMLParser):
    """Names of the elements, and the texts between them."""

    def __init__(self, page: str):
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_step_says_what_was_done_with_which_element_and_what_went_wrong():
    steps = [
        {"url": "http://shop/", "picture": "start.png"},
        {
            "action": "I think:\n```click [4]```",
            "target": "link 'Chair'",
            "url": "http://shop/chair",
            "picture": "000.png",
        },
        {"action": "fly", "note": "'fly' is no action", "dialogs": ["alert: 'no'"], "screenshot": "it has crashed"},
        {"action": "stop []", "ending": "stopped", "score": 1.0, "seconds": 0.125, "picture": "002.png"},
    ]
    page = Elements(episode_page({"task": "Buy a chair", "task_id": "7", "reward": 0.5}, steps))
    for text in (
        "Buy a chair",
        "task id",
        "0.5",
        "1. click [4] link 'Chair'",
        "I think:\n```click [4]```",
        "http://shop/chair",
        "2. fly",
        "'fly' is no action",
        "alert: 'no'",
        "it has crashed",
        "3. stop []",
    ):
        assert text in page.texts
    assert any("ends the episode: stopped, score 1" in text for text in page.texts)
    assert page.names.count("img") == 3


TEXT = st.text(alphabet=st.sampled_from("<>\"'&/!-` \nabc="), max_size=30)


@given(task=TEXT, action=TEXT, note=TEXT, target=TEXT, url=TEXT, dialog=TEXT)
def test_no_text_makes_an_element(task, action, note, target, url, dialog):
    def names(*texts: str) -> list[str]:
        task, action, note, target, url, dialog = texts
        step = {"action": action, "note": note, "target": target, "url": url, "dialogs": [dialog], "picture": "000.png"}
        page = Elements(episode_page({"task": task}, [{"url": url, "picture": "start.png"}, step]))
        return [name for name in page.names if name not in ("p", "pre")]

    assert names(task, action, note, target, url, dialog) == names("a", "b", "c", "d", "e", "f")
