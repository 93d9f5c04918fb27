"""Tasks on the served sites, in the format of WebArena, each with the plan of an expert who does it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from marl_ray.envs.web.webarena.site_pack.world import SyntheticWorld, synthetic_world
from marl_ray.envs.web.webarena.tasks.webarena import AND_SEPARATOR, WebArenaRecord

Plan = tuple[tuple[str, ...], ...]
"""Steps: `click NAME`, `type NAME TEXT`, `tab NUMBER` and `stop ANSWER`, in which NAME is that of an element."""
PER_TEMPLATE = 4
"""Tasks of each template, which makes 60 in all: a pass over them takes a browser a few minutes."""
SHOP, FORUM, WIKI = "__SHOPPING__", "__REDDIT__", "__WIKIPEDIA__"


@dataclass(frozen=True)
class SyntheticWebTask:
    """A task and how it is done."""

    record: WebArenaRecord
    plan: Plan


@dataclass(frozen=True)
class _Draft:
    """A task as its template writes it."""

    start: str
    intent: str
    evaluation: dict[str, object]
    plan: Plan


@lru_cache(maxsize=8)
def synthetic_tasks(world_seed: int, seed: int, per_template: int = PER_TEMPLATE) -> tuple[SyntheticWebTask, ...]:
    """Return `per_template` tasks of each template of `TEMPLATES`, which cover all evaluators of WebArena.

    world_seed: seed of the sites' contents.
    seed: seed of what is asked.
    """
    world = synthetic_world(world_seed)
    tasks: list[SyntheticWebTask] = []
    for template, make in enumerate(TEMPLATES):
        rng = random.Random(f"tasks {seed} {template}")
        for _ in range(per_template):
            tasks.append(_make_task(len(tasks), template, make(world, rng)))
    return tuple(tasks)


def _make_task(number: int, template: int, draft: _Draft) -> SyntheticWebTask:
    names = {SHOP: "shopping", FORUM: "reddit", WIKI: "wikipedia"}
    evaluation = {"reference_answers": None, "reference_url": "", "program_html": [], **draft.evaluation}
    record = {
        "task_id": number,
        "sites": [name for placeholder, name in names.items() if placeholder in draft.start],
        "start_url": draft.start,
        "intent": draft.intent,
        "intent_template": "",
        "intent_template_id": template,
        "instantiation_dict": {},
        "eval": evaluation,
    }
    return SyntheticWebTask(WebArenaRecord.model_validate(record), draft.plan)


def _answer(note: str = "", **references: object) -> dict[str, object]:
    return {"eval_types": ["string_match"], "reference_answers": references, "string_note": note}


def _address(url: str) -> dict[str, object]:
    return {"eval_types": ["url_match"], "reference_url": url}


def _content(url: str, locator: str, **required: object) -> dict[str, object]:
    part = {"url": url, "locator": locator, "required_contents": required}
    return {"eval_types": ["program_html"], "program_html": [part]}


def _price(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    plan = ("click", product.name), ("stop", product.price)
    return _Draft(SHOP, f"What does {product.name} cost?", _answer(exact_match=product.price), plan)


def _cheapest(world: SyntheticWorld, rng: random.Random) -> _Draft:
    products = rng.sample(world.products, 3)
    best = min(products, key=lambda product: product.cents)
    names = ", ".join(product.name for product in products)
    return _Draft(SHOP, f"Which costs least: {names}?", _answer(must_include=[best.name]), (("stop", best.name),))


def _stars(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    stars = rng.choice(product.reviews).stars
    count = str(sum(review.stars == stars for review in product.reviews))
    intent = f"How many reviews give {product.name} {stars} stars?"
    return _Draft(SHOP, intent, _answer(must_include=[count]), (("click", product.name), ("stop", count)))


def _reviewers(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    authors = [review.author for review in product.reviews]
    plan = ("click", product.name), ("stop", ", ".join(authors))
    return _Draft(SHOP, f"Who has reviewed {product.name}?", _answer(must_include=authors), plan)


def _open_product(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    plan = ("click", product.name), ("stop", "")
    return _Draft(SHOP, f"Show me {product.name}.", _address(f"{SHOP}/products/{product.number}"), plan)


def _search(world: SyntheticWorld, rng: random.Random) -> _Draft:
    word = rng.choice(world.products).name.split()[1].lower()
    plan = ("type", "Search", word), ("stop", "")
    return _Draft(SHOP, f'Search the shop for "{word}".', _address(f"{SHOP}/search?q={word}"), plan)


def _buy(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    check = _content(f"{SHOP}/cart", "document.querySelector('#cart').innerText", must_include=[product.name])
    plan = ("click", product.name), ("click", "Add to cart"), ("stop", "")
    return _Draft(SHOP, f"Put {product.name} into the cart.", check, plan)


def _review(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product, text = rng.choice(world.products), rng.choice(["Works well", "Came late", "Not for me"])
    check = _content("last", "document.querySelector('#reviews').innerText", must_include=[f"you: {text} |OR| {text}."])
    plan = ("click", product.name), ("type", "Review", text), ("stop", "")
    return _Draft(SHOP, f'Review {product.name} with the text "{text}" and stay there.', check, plan)


def _missing(world: SyntheticWorld, rng: random.Random) -> _Draft:
    name = f"Violet {rng.choice(['Bicycle', 'Piano', 'Sofa', 'Tractor'])}"
    check = _answer(f"There is no {name} in the shop", fuzzy_match="N/A")
    return _Draft(SHOP, f"What does {name} cost? Say N/A if there is none.", check, (("stop", "N/A"),))


def _author(world: SyntheticWorld, rng: random.Random) -> _Draft:
    post = rng.choice(world.posts)
    plan = ("click", post.forum), ("stop", post.author)
    intent = f'Who wrote "{post.title}" in the forum {post.forum}?'
    return _Draft(FORUM, intent, _answer(exact_match=post.author), plan)


def _favourite(world: SyntheticWorld, rng: random.Random) -> _Draft:
    forum = rng.choice(world.forums)
    best = max((post for post in world.posts if post.forum == forum), key=lambda post: post.votes)
    plan = ("click", forum), ("stop", f'It is "{best.title}".')
    return _Draft(FORUM, f"Which post in {forum} has the most votes?", _answer(fuzzy_match=[best.title]), plan)


def _write(world: SyntheticWorld, rng: random.Random) -> _Draft:
    forum, title = rng.choice(world.forums), f"Question {rng.randint(100, 999)}"
    check = _content(
        "func:reddit_get_post_url('__last_url__')", "document.querySelector('h1').outerText", exact_match=title
    )
    plan = ("click", forum), ("type", "Title", title), ("stop", "")
    return _Draft(FORUM, f'Post "{title}" in {forum} and stay on its page.', check, plan)


def _upvote(world: SyntheticWorld, rng: random.Random) -> _Draft:
    post = rng.choice(world.posts)
    url, locator = f"{FORUM}/f/{post.forum}/{post.number}", "document.querySelector('#votes').outerText"
    check = _content(url, locator, exact_match=str(post.votes + 1))
    check |= {"eval_types": ["url_match", "program_html"], "reference_url": url}
    plan = ("click", post.forum), ("click", post.title), ("click", "Upvote"), ("stop", "")
    return _Draft(FORUM, f'Vote for "{post.title}" in {post.forum} and stay there.', check, plan)


def _founding_year_task(world: SyntheticWorld, rng: random.Random) -> _Draft:
    town = rng.choice(world.towns)
    plan = ("click", town.name), ("stop", str(town.founded))
    return _Draft(WIKI, f"When was {town.name} founded?", _answer(exact_match=str(town.founded)), plan)


def _origin(world: SyntheticWorld, rng: random.Random) -> _Draft:
    product = rng.choice(world.products)
    town = next(town for town in world.towns if town.name == product.town)
    plan = ("click", product.name), ("tab", "1"), ("click", town.name), ("stop", f"The {town.river}")
    intent = f"On which river lies the town in which {product.name} is made?"
    return _Draft(f"{SHOP}{AND_SEPARATOR}{WIKI}", intent, _answer(must_include=[town.river]), plan)


TEMPLATES: tuple[Callable[[SyntheticWorld, random.Random], _Draft], ...] = (
    _price,
    _cheapest,
    _stars,
    _reviewers,
    _open_product,
    _search,
    _buy,
    _review,
    _missing,
    _author,
    _favourite,
    _write,
    _upvote,
    _founding_year_task,
    _origin,
)
"""Each makes a task of its kind; the place of one in this order is the template's number."""
