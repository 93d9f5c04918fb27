"""The checks of `.ci/house`, on small repositories, each of which breaks one rule."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2] / ".ci" / "house"
PURPOSE = '"""The folder\'s purpose."""\n'
CLEAN = {
    "src/marl_ray/__init__.py": PURPOSE,
    "src/marl_ray/rewards/__init__.py": PURPOSE,
    **{f"src/marl_ray/rewards/r{number}.py": "print('paid')\n" for number in range(12)},
    "src/marl_ray/extensions.py": "print('marl_ray.rewards.r1:PAY', 'marl_ray.rewards.r2:PAY')\n",
    "src/marl_ray/ray_seams.py": "from ray._private import _Thing\n\nTHING = _Thing\n",
    "src/marl_ray/sides.py": 'def sides(pair):\n    """Return both."""\n    left, right = pair\n    return left, right\n',
    "serve/app.py": "from marl_ray.ray_seams import THING\nfrom marl_ray.sides import sides\n\nprint(sides(THING))\n",
    "tests/unit/test_sides.py": "@given(strategy())\ndef test_a_side_is_found(side): assert setattr(side, '__len__', 2)\n",
    "tests/unit/docs/test_pages.py": "",
}
BROKEN: dict[str, tuple[dict[str, str], list[str]]] = {
    "large_folders": (
        {
            "src/marl_ray/full/__init__.py": PURPOSE,
            **{f"src/marl_ray/full/m{number:02}.py": "" for number in range(10)},
            "src/marl_ray/agents/__init__.py": PURPOSE,
            "src/marl_ray/agents/builtin/__init__.py": PURPOSE,
            **{f"src/marl_ray/agents/builtin/a{number:02}.py": "" for number in range(10)},
        },
        [
            "src/marl_ray/agents/builtin/a09.py:1: the folder has 10 files, expected 9 at most",
            "src/marl_ray/full/m09.py:1: the folder has 10 files, expected 9 at most",
        ],
    ),
    "long_files": (
        {"benchmarks/long.py": "\n" * 401},
        ["benchmarks/long.py:401: the file has 401 lines, expected 400 at most"],
    ),
    "folders_without_purpose": (
        {"benchmarks/games/chess.py": "", "src/marl_ray/full/__init__.py": '"""No sentence"""\n'},
        [
            "benchmarks/games/__init__.py:1: expected a docstring that says the folder's purpose in one sentence",
            "src/marl_ray/full/__init__.py:1: expected a docstring that says the folder's purpose in one sentence",
        ],
    ),
    "repeated_folders": (
        {
            "benchmarks/environments/__init__.py": PURPOSE,
            "benchmarks/environments/own_environment.py": "",
            "src/marl_ray/engines/__init__.py": PURPOSE,
            "src/marl_ray/engines/paged_engine.py": "import torch\n",
            "src/marl_ray/engines/torch_engine.py": "import torch\n",
            "src/marl_ray/engines/csv_engine.py": "",
            "tests/e2e/wheels/test_wheel_size.py": "",
            "tests/e2e/wheels/test_wheels.py": "",
        },
        [
            "benchmarks/environments/own_environment.py:1: expected a name that does not repeat the folder's, environments",
            "src/marl_ray/engines/paged_engine.py:1: expected a name that does not repeat the folder's, engines",
            "tests/e2e/wheels/test_wheel_size.py:1: expected a name that does not repeat the folder's, wheels",
        ],
    ),
    "misnamed_interfaces": (
        {
            "src/marl_ray/arms/__init__.py": PURPOSE,
            "src/marl_ray/arms/base.py": "class Arm(Protocol): ...\n\n\nprint(Arm)\n",
            "src/marl_ray/arms/protocol.py": "class Reply: ...\n\n\nprint(Reply)\n",
        },
        [
            "src/marl_ray/arms/base.py:1: expected a class that others inherit in a module of this name",
            "src/marl_ray/arms/protocol.py:1: expected a Protocol in a module of this name",
        ],
    ),
    "misplaced_tests": (
        {"tests/unit/other/test_other.py": ""},
        ["tests/unit/other/test_other.py:1: expected unit tests in the folders of src/marl_ray, which has no other/"],
    ),
    "cycles": (
        {
            "src/marl_ray/one.py": "import os\nfrom marl_ray import two\n",
            "src/marl_ray/two.py": "def late():\n    from marl_ray.one import os\n\n\nlate()\n",
        },
        ["src/marl_ray/one.py:2: these files import each other: marl_ray.one -> marl_ray.two -> marl_ray.one"],
    ),
    "private_imports": (
        {
            "src/marl_ray/hidden.py": "_hidden = 1\n\nprint(_hidden)\n",
            "src/marl_ray/rays.py": "from ray.serve import _private\n\nprint(_private)\n",
            "tests/unit/test_other.py": "from marl_ray.hidden import _hidden\n",
        },
        [
            "src/marl_ray/rays.py:1: only ray_seams.py imports private parts of Ray, such as ray.serve._private",
            "tests/unit/test_other.py:1: a test imports marl_ray.hidden._hidden, which is private",
        ],
    ),
    "overridden_methods": (
        {
            "src/marl_ray/rays.py": (
                "from ray.serve import Client\n\n\nclass Slow(Client):\n    def _send(self): ...\n\n\nSlow()\n"
            )
        },
        ["src/marl_ray/rays.py:5: only ray_seams.py overrides private methods of Ray, such as Slow._send"],
    ),
    "private_reaches": (
        {
            "src/marl_ray/rays.py": (
                "import ray._raylet, ray.util as tools\n"
                "ray.init(_temp_dir=tools._folder, num_cpus=getattr(tools, '_count'))\n"
                "print('from ray.train.v2._internal import callbacks', __file__)\n"
            )
        },
        [
            "src/marl_ray/rays.py:1: only ray_seams.py reaches private parts of Ray, such as ray._raylet",
            "src/marl_ray/rays.py:2: only ray_seams.py reaches private parts of Ray, such as _count",
            "src/marl_ray/rays.py:2: only ray_seams.py reaches private parts of Ray, such as ray.init(_temp_dir=)",
            "src/marl_ray/rays.py:2: only ray_seams.py reaches private parts of Ray, such as tools._folder",
            "src/marl_ray/rays.py:3: only ray_seams.py reaches private parts of Ray, such as ray.train.v2._internal",
        ],
    ),
    "replaced_privates": (
        {
            "src/marl_ray/hidden.py": "_hidden = 1\n\nprint(_hidden)\n",
            "tests/unit/test_other.py": (
                "def test_other(patch):\n"
                "    patch.setattr('marl_ray.hidden._hidden', 2)\n"
                "    patch.setattr('psutil._pslinux', 2)\n"
            ),
        },
        ["tests/unit/test_other.py:2: a test replaces _hidden, a private name of the product"],
    ),
    "types_of_one_name": (
        {
            "src/marl_ray/names.py": "class Side: ...\n\n\nSide()\n",
            "src/marl_ray/texts.py": "class Side: ...\n\n\nSide()\n",
        },
        ["src/marl_ray/texts.py:1: the type Side has the name of another, in src/marl_ray/names.py"],
    ),
    "any_types": (
        {
            "src/marl_ray/untyped.py": f"Row = tuple[{'Any, ' * 16}]\n\nRow()\n",
            "src/marl_ray/tuning.py": f"Rows = tuple[{'Any, ' * 30}]\n\nRows()\n",
        },
        [
            "src/marl_ray/untyped.py:1: untyped says Any 16 times, expected 15 at most: name the type, JSON's of "
            "json_types.py, or object for what is passed on or checked"
        ],
    ),
    "annotated_tests": (
        {
            "tests/unit/test_other.py": (
                "def test_other(patch) -> None: ...\n\n\nasync def test_more(patch, *, side: str = ''): ...\n"
            )
        },
        [
            "tests/unit/test_other.py:1: test_other has annotations, which tests do not have",
            "tests/unit/test_other.py:4: test_more has annotations, which tests do not have",
        ],
    ),
    "shadowing": (
        {
            "benchmarks/shadows.py": (
                "from a import b, c\n"
                "def d(): ...\n"
                "def by_name(b):\n"
                "    c = [d for d in b]\n"
                "    def by_name(): ...\n"
                "    return c\n"
                "class E:\n"
                "    b = 1\n"
                "    def c(self): ...\n"
            )
        },
        [
            "benchmarks/shadows.py:3: the local by_name has the name of something in its module",
            "benchmarks/shadows.py:3: the local c has the name of something in its module",
            "benchmarks/shadows.py:4: the local d has the name of something in its module",
        ],
    ),
    "fragments": (
        {"src/marl_ray/texts.py": 'class Side:\n    """What it holds."""\n\n\nSide()\n'},
        ["src/marl_ray/texts.py:2: expected a docstring that begins like a sentence, got 'What it holds.'"],
    ),
    "without_verb": (
        {
            "src/marl_ray/texts.py": (
                "class Side:\n"
                "    def show(self):\n"
                '        """Rows of a file."""\n\n'
                "    @property\n"
                "    def rows(self):\n"
                '        """All rows."""\n\n\n'
                "Side()\n"
            )
        },
        [
            "src/marl_ray/texts.py:3: expected a docstring that begins with a verb in the imperative, got 'Rows of a file.'"
        ],
    ),
    "unexplained_numbers": (
        {
            "src/marl_ray/training/__init__.py": PURPOSE,
            "src/marl_ray/training/waits.py": (
                "# Seconds of the first waits.\n"
                "FIRST_S = 1.0\n"
                "SECOND_S = 2.0\n\n"
                "LAST_S, AGAIN_S = 2 * 60, -3.0\n"
                'DAY_S = 86_400\n"""Seconds."""\n'
                "HOUR_S = 3_600  # seconds\n"
                "NAME, IS_ON = '1', True\n"
                "WEEK_S = MAX_S = 604_800\n\n\n"
                "print(FIRST_S, SECOND_S, LAST_S, AGAIN_S, DAY_S, HOUR_S, NAME, IS_ON, WEEK_S, MAX_S)\n"
            ),
        },
        [
            "src/marl_ray/training/waits.py:5: the number (LAST_S, AGAIN_S) has neither unit nor source nor reason",
            "src/marl_ray/training/waits.py:10: the number WEEK_S = MAX_S has neither unit nor source nor reason",
        ],
    ),
    "unsaid_none": (
        {
            "src/marl_ray/texts.py": (
                "class Side:\n"
                "    def find(self) -> int | None:\n"
                '        """Return the first row."""\n\n'
                "    def look(self) -> 'None | int':\n"
                '        """Return the last row."""\n\n'
                "    def choose(self) -> 'MaybeRow':\n"
                '        """Return a row."""\n\n'
                "    def sort(self) -> None:\n"
                '        """Sort the rows, and find none."""\n\n'
                "    def compare(self) -> Difference:\n"
                '        """Compare the rows."""\n\n\n'
                "MaybeRow = int | None\n"
                "Difference = str | None\n"
                '"""A sentence; None without a difference."""\n'
                "Side().find(), Side().look(), Side().choose(), Side().sort(), Side().compare()\n"
            )
        },
        [
            "src/marl_ray/texts.py:2: expected a docstring that says when find returns None",
            "src/marl_ray/texts.py:5: expected a docstring that says when look returns None",
            "src/marl_ray/texts.py:8: expected a docstring that says when choose returns None",
        ],
    ),
    "unsaid_errors": (
        {
            "src/marl_ray/training/__init__.py": PURPOSE,
            "src/marl_ray/training/store.py": (
                "class Store:\n"
                '    """A store."""\n\n'
                "    def __init__(self, path):\n"
                "        if not path:\n"
                "            raise OSError\n\n"
                "    def read(self):\n"
                '        """Return the rows."""\n'
                "        try:\n"
                "            raise KeyError('caught below')\n"
                "        except KeyError as error:\n"
                "            raise errors.MarlRayError from error\n\n"
                "    def write(self):\n"
                '        """Write the rows. Raises OSError if the disk is full."""\n'
                "        raise OSError\n\n"
                "    def keep(self):\n"
                '        """Keep the rows. Raises as `write` does."""\n'
                "        raise OSError\n\n"
                "    def extend(self):\n"
                '        """Add rows."""\n'
                "        def late(): raise OSError\n"
                "        raise NotImplementedError(late)\n\n\n"
                "Store().read(), Store().write(), Store().keep(), Store().extend()\n"
            ),
        },
        [
            "src/marl_ray/training/store.py:4: expected a docstring that says when __init__ raises OSError",
            "src/marl_ray/training/store.py:8: expected a docstring that says when read raises MarlRayError",
        ],
    ),
    "vague_names": (
        {"tests/unit/test_other.py": "def test_other(found, left): ...\n\n\nTOLD = 1\n"},
        [
            "tests/unit/test_other.py:1: the name found does not say what it stands for",
            "tests/unit/test_other.py:1: the name left says nothing alone",
            "tests/unit/test_other.py:4: the name TOLD does not say what it stands for",
        ],
    ),
    "misnamed_failures": (
        {
            "src/marl_ray/texts.py": "save_problem, benchmark = 1, 2\n",
            "src/marl_ray/envs/__init__.py": PURPOSE,
            "src/marl_ray/envs/web.py": "class Page:\n    def begin(self):\n        self._problems = 0\n\n\nPage()\n",
            "src/marl_ray/evaluation/__init__.py": PURPOSE,
            "src/marl_ray/evaluation/report.py": "def score(problems): ...\n\n\nscore()\n",
            "src/marl_ray/training/__init__.py": PURPOSE,
            "src/marl_ray/training/trust_region.py": "def solve(problem): ...\n\n\nsolve()\n",
            "tests/support/faults.py": "def problems(): ...\n",
        },
        [
            "src/marl_ray/envs/web.py:3: the name _problems is of a benchmark's exercise, expected a failure's own word",
            "src/marl_ray/texts.py:1: the name save_problem is of a benchmark's exercise, expected a failure's own word",
            "tests/support/faults.py:1: the name problems is of a benchmark's exercise, expected a failure's own word",
        ],
    ),
    "bare_participles": (
        {
            "src/marl_ray/acts.py": (
                "def _fetched(): ...\n\n\ndef seed(): ...\n\n\nclass Page:\n"
                "    def _closed(self): ...\n\n    @property\n    def ended(self): ...\n\n\n"
                "_fetched(seed(), Page())\n"
            )
        },
        [
            "src/marl_ray/acts.py:1: the function _fetched is named by a participle, expected a verb and its object",
            "src/marl_ray/acts.py:8: the function _closed is named by a participle, expected a verb and its object",
        ],
    ),
    "unlike_limits": (
        {
            "tests/support/limits.py": (
                "ROWS, SIZE = 2, 3\n"
                '"""Maximum number of rows, and of their bytes."""\n'
                "LONGEST_LINE = 4\n\n\n"
                "def truncate(most_rows): ...\n"
            )
        },
        [
            "tests/support/limits.py:1: the limit ROWS does not begin with MAX_ or MIN_",
            "tests/support/limits.py:3: the limit LONGEST_LINE does not begin with max_ or min_",
            "tests/support/limits.py:6: the limit most_rows does not begin with max_ or min_",
        ],
    ),
    "unread_names": (
        {
            "docs/page.md": "```python\nfrom marl_ray.names import shown\n```\n",
            "src/marl_ray/names.py": "def shown(): ...\n\n\ndef unread(): ...\n\n\n_hidden = 1\n",
        },
        [
            "src/marl_ray/names.py:4: nothing in the product reads unread",
            "src/marl_ray/names.py:7: nothing in the product reads _hidden",
        ],
    ),
}
"""Rule -> files that break it beside those of `CLEAN`, and the lines about them."""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def findings(root: Path) -> list[str]:
    """Return what the command prints about a repository; it fails exactly if it prints anything."""
    done = subprocess.run([sys.executable, HOUSE, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr and done.returncode == bool(done.stdout)
    return done.stdout.splitlines()


def test_a_repository_that_keeps_the_rules_has_no_findings(tmp_path):
    write(tmp_path, CLEAN)
    assert findings(tmp_path) == []


def test_each_rule_has_a_case(monkeypatch):
    monkeypatch.syspath_prepend(HOUSE)
    checks = runpy.run_path(str(HOUSE / "__main__.py"))["CHECKS"]
    assert BROKEN.keys() == {check.__name__ for check in checks} | {"unread_names"}


@pytest.mark.parametrize(("files", "lines"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_a_line_with_its_place(tmp_path, files, lines):
    write(tmp_path, CLEAN | files)
    assert findings(tmp_path) == lines


def test_a_file_that_python_cannot_read_is_a_finding(tmp_path):
    write(tmp_path, {"jobs/train.py": "x = 1\ny = (\n"})
    assert findings(tmp_path) == [f"{tmp_path}/jobs/train.py:2: '(' was never closed"]


def test_the_folders_to_which_recipes_add_files_exist(monkeypatch):
    monkeypatch.syspath_prepend(HOUSE)
    recipes = runpy.run_path(str(HOUSE / "layout.py"))["RECIPES"]
    assert [folder for folder in recipes if not (HOUSE.parents[1] / "src/marl_ray" / folder).is_dir()] == []
