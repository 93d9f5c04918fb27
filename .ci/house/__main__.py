"""Checks the rules of CONTRIBUTING.md that no linter has, and prints a line `FILE:LINE: MESSAGE` for each finding.

    python .ci/house [ROOT]

ROOT is the repository; without it, the one of this file. `make check` and pre-commit call it. The exit status is 1 if
anything was found.
"""

import gc
import sys
from pathlib import Path

import definitions
import docstrings
import imports
import layout
import shadowing
import sources
import vague_names

CHECKS = (
    layout.large_folders,
    layout.long_files,
    layout.folders_without_purpose,
    layout.repeated_folders,
    layout.misnamed_interfaces,
    layout.misplaced_tests,
    imports.cycles,
    imports.private_imports,
    imports.overridden_methods,
    imports.private_reaches,
    imports.replaced_privates,
    definitions.types_of_one_name,
    definitions.any_types,
    definitions.annotated_tests,
    shadowing.shadowing,
    docstrings.fragments,
    docstrings.without_verb,
    docstrings.unexplained_numbers,
    docstrings.unsaid_none,
    docstrings.unsaid_errors,
    vague_names.vague_names,
    vague_names.misnamed_failures,
    vague_names.bare_participles,
    vague_names.unlike_limits,
)


def main(root: Path) -> int:
    """Print the findings; return 1 if there are any, else 0."""
    gc.disable()  # a million nodes live until the end, and looking for cycles among them takes twice as long as the checks
    try:
        files = sources.read(root)
    except SyntaxError as error:
        print(f"{error.filename}:{error.lineno}: {error.msg}")
        return 1
    findings = {finding for check in CHECKS for finding in check(files)}
    findings |= set(definitions.unread_names(files, sorted((root / "docs").rglob("*.md"))))
    for finding in sorted(findings):
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]))
