"""An episode as a page for people: the task, then every action with what it led to."""

from collections.abc import Mapping, Sequence
from html import escape

from marl_ray.json_types import JsonMapping

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1rem; margin: 2rem 0 .3rem; }
dl { display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; margin: 1rem 0; }
dt, .small { color: GrayText; font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
.small { overflow-wrap: anywhere; }
.fault { border-left: .25rem solid #c33; padding-left: .6rem; }
img { display: block; max-width: min(100%, 44rem); margin-top: .4rem; border: 1px solid GrayText; }
"""


def episode_page(about: Mapping[str, object], steps: Sequence[Mapping[str, object]]) -> str:
    """Return HTML that shows the pictures beside it.

    All text is quoted, so that a text of a page or an agent makes no element.

    about: facts of the episode by name, of which `task` is the heading.
    steps: the first is the opening, as `EpisodeRecord` writes them.
    """
    task = escape(str(about.get("task", "")))
    facts = "".join(
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_format_value(value))}</dd></div>"
        for name, value in about.items()
        if name != "task"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{task}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{task}</h1><dl>{facts}</dl>\n{''.join(map(_step_section, range(len(steps)), steps))}</body></html>\n"
    )


def _step_section(number: int, step: JsonMapping) -> str:
    action, target = str(step.get("action", "")), str(step.get("target", ""))
    title = f"{number}. {_first_line(action) or 'no action'}" if number else "The page at the beginning"
    parts = [f"<h2>{escape(f'{title} {target}'.strip())}</h2>"]
    if "\n" in action.strip():
        parts.append(f"<pre>{escape(action.strip())}</pre>")
    if step.get("note"):
        parts.append(f'<p class="fault">{escape(str(step["note"]))}</p>')
    parts += [f'<p class="fault">{escape(str(text))}</p>' for text in step.get("dialogs", ())]
    facts = [str(step.get("url", ""))]
    facts += [f"{step['seconds']:.2f} s"] if "seconds" in step else []
    facts += [f"ends the episode: {step['ending']}, score {step['score']:g}"] if step.get("ending") else []
    parts.append(f'<div class="small">{escape(" · ".join(facts))}</div>')
    picture = step.get("picture")
    parts.append(
        f'<img src="{escape(str(picture))}" alt="the page afterwards">'
        if picture
        else f'<p class="fault">{escape(str(step.get("screenshot", "no screenshot")))}</p>'
    )
    return f"<section>{''.join(parts)}</section>\n"


def _first_line(action: str) -> str:
    """Return the action alone, where the agent has put it between two marks of three backquotes."""
    inside = action.split("```")[1] if action.count("```") > 1 else action
    lines = inside.strip().splitlines()
    return lines[0][:200] if lines else ""


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
