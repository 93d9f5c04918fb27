"""Contents of the shop, the forum and the wiki, made from a seed."""

import random
from dataclasses import dataclass
from functools import cache

_COLOURS = ("Amber", "Azure", "Coral", "Ivory", "Jade", "Ochre", "Pearl", "Ruby", "Slate", "Teal")
_THINGS = ("Bench", "Candle", "Drum", "Globe", "Kettle", "Lantern", "Mirror", "Quilt", "Saddle", "Teapot")
_PEOPLE = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katya", "Liam")
_TOWNS = ("Ardwick", "Belmora", "Castrel", "Dunhallow", "Elverum", "Fenbridge", "Garlow", "Hexley")
_RIVERS = ("Aune", "Brack", "Corve", "Drave")
_FORUMS = ("books", "cooking", "hiking")
_TOPICS = (
    "soup",
    "maps",
    "boots",
    "stories",
    "spices",
    "tents",
    "bread",
    "poems",
    "trails",
    "letters",
    "ovens",
    "ropes",
)


@dataclass(frozen=True)
class Review:
    """An opinion on a product."""

    author: str
    stars: int
    text: str


@dataclass(frozen=True)
class ShopProduct:
    """An article of the shop."""

    number: int
    name: str
    cents: int
    town: str
    """Name of the town in which it is made."""
    reviews: tuple[Review, ...]

    @property
    def price(self) -> str:
        """The price in dollars as the pages show it, such as `$12.05`."""
        return f"${self.cents // 100}.{self.cents % 100:02d}"


@dataclass(frozen=True)
class ForumPost:
    """A post of the forum."""

    number: int
    forum: str
    title: str
    author: str
    votes: int


@dataclass(frozen=True)
class WikiTown:
    """An article of the wiki."""

    name: str
    founded: int
    river: str


@dataclass(frozen=True)
class SyntheticWorld:
    """All that the three sites say before anybody changes it."""

    products: tuple[ShopProduct, ...]
    posts: tuple[ForumPost, ...]
    towns: tuple[WikiTown, ...]

    @property
    def forums(self) -> tuple[str, ...]:
        """The names of the forums, which are the same in all worlds."""
        return _FORUMS


@cache
def synthetic_world(seed: int) -> SyntheticWorld:
    """Return the world of a seed: 10 products, 12 posts and 8 towns.

    Of their names, prices and votes no two are equal.
    """
    rng = random.Random(f"world {seed}")
    years = rng.sample(range(1100, 1900), len(_TOWNS))
    towns = tuple(WikiTown(name, year, rng.choice(_RIVERS)) for name, year in zip(_TOWNS, years, strict=True))
    names = [
        f"{colour} {thing}" for colour, thing in zip(rng.sample(_COLOURS, 10), rng.sample(_THINGS, 10), strict=True)
    ]
    prices = rng.sample(range(500, 20000), len(names))
    products = tuple(
        ShopProduct(number, name, cents, rng.choice(towns).name, tuple(_reviews(rng)))
        for number, (name, cents) in enumerate(zip(names, prices, strict=True), 1)
    )
    votes = rng.sample(range(2, 90), len(_TOPICS))
    posts = tuple(
        ForumPost(number, _FORUMS[number % len(_FORUMS)], f"All about {topic}", rng.choice(_PEOPLE), count)
        for number, (topic, count) in enumerate(zip(rng.sample(_TOPICS, len(_TOPICS)), votes, strict=True), 1)
    )
    return SyntheticWorld(products, posts, towns)


def _reviews(rng: random.Random) -> list[Review]:
    authors = rng.sample(_PEOPLE, rng.randint(3, 5))
    return [Review(author, rng.randint(2, 5), f"{author} thinks that it is fine.") for author in authors]
