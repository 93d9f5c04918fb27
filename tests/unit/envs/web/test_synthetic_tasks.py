"""Synthetic tasks on the served sites: the same for a seed, of all evaluators, and no visitor sees another's changes."""

import pytest

from marl_ray.envs.web.webarena.site_pack.expert import expert_action
from marl_ray.envs.web.webarena.site_pack.pages import Visit, reply
from marl_ray.envs.web.webarena.site_pack.synthetic_tasks import TEMPLATES, synthetic_tasks
from marl_ray.envs.web.webarena.site_pack.world import synthetic_world
from marl_ray.envs.web.webarena.tasks.schema import AddressCheck, AnswerCheck, PageCheck
from marl_ray.envs.web.webarena.tasks.webarena import webarena_task
from marl_ray.errors import MarlRayError

WORLD = synthetic_world(0)


def test_tasks_are_the_same_for_a_seed_and_cover_all_evaluators():
    tasks = synthetic_tasks(0, 0)
    assert len(tasks) == 4 * len(TEMPLATES) == 60
    synthetic_tasks.cache_clear()
    assert synthetic_tasks(0, 0) == tasks
    assert synthetic_tasks(0, 1) != tasks
    checks = [check for task in tasks for check in webarena_task(task.record).checks]
    assert {type(check) for check in checks} == {AnswerCheck, AddressCheck, PageCheck}
    answers = [check for check in checks if isinstance(check, AnswerCheck)]
    assert all(
        any(getattr(answer, kind) for answer in answers) for kind in ("exact", "include", "fuzzy", "not_achievable")
    )
    assert any(len(task.record.sites) == 2 for task in tasks)


@pytest.mark.parametrize("seed", range(5))
def test_a_world_has_no_two_equal_prices_or_votes(seed):
    world = synthetic_world(seed)
    assert len({product.cents for product in world.products}) == len({product.name for product in world.products}) == 10
    assert len({post.votes for post in world.posts}) == 12
    assert all(any(town.name == product.town for town in world.towns) for product in world.products)


def page(site: str, path: str, visit: Visit, **query: str) -> str:
    answer = reply(site, path, query, WORLD, visit)
    return answer.html if not answer.location else page(site, answer.location, visit)


def test_what_a_visitor_changes_only_that_visitor_sees():
    name, post = WORLD.products[2].name, WORLD.posts[0]
    first, other = Visit(), Visit()
    assert name in page("shopping", "/products/3/buy", first)
    assert "<li>you: fine &lt;b&gt;</li>" in page("shopping", "/products/3/review", first, text="fine <b>")
    assert "<h1>My post</h1>" in page("reddit", f"/f/{post.forum}/new", first, title="My post")
    votes = f'<span id="votes">{post.votes + 1}</span>'
    assert votes in page("reddit", f"/f/{post.forum}/{post.number}/upvote", first)
    assert votes in page("reddit", f"/f/{post.forum}/{post.number}/upvote", first), "a vote counts once"
    assert name not in page("shopping", "/cart", other)
    assert "My post" not in page("reddit", f"/f/{post.forum}", other)
    assert votes not in page("reddit", f"/f/{post.forum}/{post.number}", other)


@pytest.mark.parametrize(
    ("site", "path"),
    [("shopping", "/products/99"), ("shopping", "/products/x/buy"), ("reddit", "/f/none"), ("reddit", "/f/books/99999"),
     ("reddit", "/f/books/²"), ("wikipedia", "/wiki/Nowhere"), ("wikipedia", "/cart")],
)  # fmt: skip
def test_an_unknown_path_is_no_page(site, path):
    assert reply(site, path, {}, WORLD, Visit()).status == 404


def test_the_expert_finds_elements_by_name():
    prompt = "[1] StaticText 'Go'\n\t[7] link 'Go' focused: True\n\t[8] textbox 'Search'"
    assert expert_action(("click", "Go"), prompt) == "click [7]"
    assert expert_action(("type", "Search", "a"), prompt) == "type [8] [a] [1]"
    assert expert_action(("tab", "1"), prompt) == "tab_focus [1]"
    assert expert_action(("stop", "yes"), prompt) == "stop [yes]"
    with pytest.raises(MarlRayError, match=r"^the page has no link, button or text box 'Buy'$"):
        expert_action(("click", "Buy"), prompt)
