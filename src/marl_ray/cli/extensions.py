"""`marl-ray check plugin` and `marl-ray new`: parts of users' own, checked and begun."""

import importlib
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.extensions import POINTS, ExtensionPoint

TEMPLATES = Path(__file__).parent.parent / "templates"
NEXT_COMMANDS_FILE = "next.txt"
"""The file of a kind's templates that names the next commands; it is printed."""

KindName = Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(POINTS)}.")]


check_app = typer.Typer(help="Check a part of your own before you run it.", no_args_is_help=True)


@check_app.command("plugin")
def check_plugin(
    kind: KindName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that configs know, or package.module:NAME.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the part, as in a config.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a part of your own keeps its protocol.

    It prints a line for every property. The exit status is 1 if one does not hold.
    """
    from marl_ray.config.load import with_overrides
    from marl_ray.conformance.extensions.properties import print_property

    module = importlib.import_module(f"marl_ray.conformance.extensions.{_extension_point(kind).kind}")
    properties = module.check(name, with_overrides({}, settings or ()))
    with only_result(as_json):
        checked = [print_property(part_property) for part_property in properties]
    passed = all(part_property.failure is None for part_property in checked)
    show(as_json, {"kind": kind, "name": name, "passed": passed, "properties": checked}, ())
    if not passed:
        raise typer.Exit(1)


def new(
    kind: KindName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new part and its file, such as my_env.")],
    as_json: Json = False,
) -> None:
    """Write a template for a part of your own, with its test.

    It writes NAME.py and the test into this folder, and a config where one shows its use.
    """
    point = _extension_point(kind)
    *files, (_, next_text) = _render_templates(point, name)
    for path, text in files:
        Path(path).write_text(text, encoding="utf-8")
    written = [path for path, _ in files]
    commands = [line.strip() for line in next_text.splitlines()[1:]]
    show(as_json, {"files": written, "next": commands}, [*(f"wrote {path}" for path in written), next_text.rstrip()])


def _extension_point(kind: str) -> ExtensionPoint:
    if kind not in POINTS:
        raise MarlRayError(f"KIND {kind!r} is unknown{did_you_mean(kind, POINTS)}")
    return POINTS[kind]


def _render_templates(point: ExtensionPoint, name: str) -> list[tuple[str, str]]:
    """Return (file, text) of a kind's templates, the next commands last.

    Raises MarlRayError if the name or a file is taken.
    """
    import jinja2

    if not (name.isidentifier() and name == name.lower() and not name.startswith("_")) or iskeyword(name):
        raise MarlRayError(
            f"NAME {name!r}: expected letters in lower case, digits and underscores, such as my_{point.kind}, and no word "
            "of Python"
        )
    variables: dict[str, object] = {"name": name, "title": name.replace("_", " "), "constant": name.upper()}
    variables["class_name"] = "".join(part.capitalize() for part in name.split("_"))
    templates = jinja2.Environment(  # noqa: S701  they are Python and Markdown
        loader=jinja2.FileSystemLoader(TEMPLATES / point.kind),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    files = sorted(templates.list_templates(), key=lambda path: (path == f"{NEXT_COMMANDS_FILE}.j2", path))
    rendered = [
        (path.removesuffix(".j2").replace("NAME", name), templates.get_template(path).render(variables))
        for path in files
    ]
    for path, _ in rendered:
        if path != NEXT_COMMANDS_FILE and Path(path).exists():
            raise MarlRayError(f"{path} is already here; choose another NAME or move it")
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise MarlRayError(f"NAME {name!r}: a module of this name is installed, which {name}.py would hide")
    return rendered
