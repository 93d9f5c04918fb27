"""Pages of the three sites as pure functions of a request, the world, and what one visitor has changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from marl_ray.envs.web.webarena.site_pack.world import ForumPost, ShopProduct, SyntheticWorld

SITE_NAMES = "shopping", "reddit", "wikipedia"
"""The sites, by their names in WebArena."""
_TITLES = {"shopping": "Shop", "reddit": "Forum", "wikipedia": "Wiki"}


@dataclass
class Visit:
    """Changes of one visitor, with one cookie."""

    cart: list[int] = field(default_factory=list)
    reviews: list[tuple[int, str]] = field(default_factory=list)
    """Number of a product, and a text."""
    posts: list[ForumPost] = field(default_factory=list)
    upvoted: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class PageReply:
    """An answer to a request: a page, or the path to which the browser continues."""

    html: str = ""
    location: str = ""
    status: int = 200


def reply(site: str, path: str, query: Mapping[str, str], world: SyntheticWorld, visit: Visit) -> PageReply:
    """Return the answer of a site to a request.

    What it changes is in `visit`; an unknown path is answered with status 404.
    """
    render = {"shopping": _shop, "reddit": _forum, "wikipedia": _wiki}[site]
    parts = [part for part in path.split("/") if part]
    return render(parts, query, world, visit) or PageReply(_page(site, "Not found", ""), status=404)


def _shop(parts: list[str], query: Mapping[str, str], world: SyntheticWorld, visit: Visit) -> PageReply | None:
    match parts:
        case []:
            return PageReply(_page("shopping", "Shop", _search() + _products(world.products)))
        case ["search"]:
            word = query.get("q", "").strip().lower()
            matches = [product for product in world.products if word and word in product.name.lower()]
            body = _products(matches) if matches else "<p>Nothing matches.</p>"
            return PageReply(_page("shopping", f"Results for {word}", _search(word) + body))
        case ["cart"]:
            items = [world.products[number - 1].name for number in visit.cart]
            return PageReply(_page("shopping", "Cart", f'<ul id="cart">{_items(items)}</ul>'))
        case ["products", number, *rest] if (product := _product(world, number)) is not None:
            if rest == ["buy"]:
                visit.cart.append(product.number)
                return PageReply(location="/cart")
            if rest == ["review"]:
                visit.reviews.append((product.number, query.get("text", "")))
                return PageReply(location=f"/products/{product.number}")
            return None if rest else PageReply(_page("shopping", product.name, _product_body(product, visit)))
    return None


def _forum(parts: list[str], query: Mapping[str, str], world: SyntheticWorld, visit: Visit) -> PageReply | None:
    posts = [*world.posts, *visit.posts]
    match parts:
        case []:
            links = [_link(f"/f/{forum}", forum) for forum in world.forums]
            return PageReply(_page("reddit", "Forum", f"<ul>{_items(links, raw=True)}</ul>"))
        case ["f", forum] if forum in world.forums:
            lines = [
                f"{_link(f'/f/{forum}/{post.number}', post.title)} by {post.author}, {_votes(post, visit)} votes"
                for post in posts
                if post.forum == forum
            ]
            body = f"<ul>{_items(lines, raw=True)}</ul>{_form(f'/f/{forum}/new', 'title', 'Title', 'Post')}"
            return PageReply(_page("reddit", forum, body))
        case ["f", forum, "new"] if forum in world.forums:
            visit.posts.append(ForumPost(len(posts) + 1, forum, query.get("title", ""), "you", 1))
            return PageReply(location=f"/f/{forum}/{len(posts) + 1}")
        case ["f", forum, number, *rest] if number.isascii() and number.isdigit():
            post = next((post for post in posts if post.forum == forum and post.number == int(number)), None)
            if post is None or rest not in ([], ["upvote"]):
                return None
            if rest:
                visit.upvoted.add(post.number)
                return PageReply(location=f"/f/{forum}/{number}")
            body = (
                f'<p>by {post.author}</p><p>Votes: <span id="votes">{_votes(post, visit)}</span></p>'
                f'<form action="/f/{forum}/{number}/upvote"><button>Upvote</button></form>'
            )
            return PageReply(_page("reddit", post.title, body))
    return None


def _wiki(parts: list[str], query: Mapping[str, str], world: SyntheticWorld, visit: Visit) -> PageReply | None:
    match parts:
        case []:
            links = [_link(f"/wiki/{town.name}", town.name) for town in world.towns]
            return PageReply(_page("wikipedia", "Wiki", f"<ul>{_items(links, raw=True)}</ul>"))
        case ["wiki", name]:
            town = next((town for town in world.towns if town.name == name), None)
            if town is not None:
                text = f"<p>{town.name} lies on the river {town.river}. It was founded in {town.founded}.</p>"
                return PageReply(_page("wikipedia", town.name, text))
    return None


def _product(world: SyntheticWorld, number: str) -> ShopProduct | None:
    return next((product for product in world.products if str(product.number) == number), None)


def _products(products: list[ShopProduct] | tuple[ShopProduct, ...]) -> str:
    lines = [f"{_link(f'/products/{product.number}', product.name)} {product.price}" for product in products]
    return f"<ul>{_items(lines, raw=True)}</ul>"


def _product_body(product: ShopProduct, visit: Visit) -> str:
    reviews = [f"{review.author}: {review.stars} stars. {review.text}" for review in product.reviews]
    reviews += [f"you: {text}" for number, text in visit.reviews if number == product.number]
    return (
        f'<p id="price">{product.price}</p><p>Made in {product.town}.</p>'
        f'<form action="/products/{product.number}/buy"><button>Add to cart</button></form>'
        f'<h2>Reviews</h2><ul id="reviews">{_items(reviews)}</ul>'
        + _form(f"/products/{product.number}/review", "text", "Review", "Send")
    )


def _votes(post: ForumPost, visit: Visit) -> int:
    return post.votes + (post.number in visit.upvoted)


def _search(word: str = "") -> str:
    return _form("/search", "q", "Search", "Find", word)


def _form(action: str, name: str, label: str, button: str, value: str = "") -> str:
    input_field = f'<input name="{name}" aria-label="{label}" value="{escape(value)}">'
    return f'<form action="{action}">{input_field}<button>{button}</button></form>'


def _items(texts: list[str], raw: bool = False) -> str:
    return "".join(f"<li>{text if raw else escape(text)}</li>" for text in texts)


def _link(path: str, text: str) -> str:
    return f'<a href="{quote(path)}">{escape(text)}</a>'


def _page(site: str, title: str, body: str) -> str:
    home = _link("/", f"{_TITLES[site]} home") + (" " + _link("/cart", "Cart") if site == "shopping" else "")
    return f"<!doctype html><title>{escape(title)}</title><nav>{home}</nav><h1>{escape(title)}</h1>{body}"
