"""The paths of the host that a run may open.

The paths depend on the modules that this process has imported, so a server asks after it has loaded those that it keeps
warm.
"""

import os
import sys
import sysconfig

from marl_ray.sandbox.confinement import landlock

_C_LIBRARY_PATHS = (
    "/lib64",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/usr/share/zoneinfo",
)
_LOCALE_PATHS = ("/usr/lib/locale", "/usr/share/locale")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def stdlib_folders() -> list[str]:
    """Return the folders of the standard library, without links."""
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})


def _loaded_packages() -> list[str]:
    """Return the files and folders of the installed packages that are loaded, which the server keeps warm.

    Programs may read no other package.
    """
    tops = {name.partition(".")[0] for name in sys.modules} - {"marl_ray"}
    files: list[str] = []
    for top in tops:
        file = getattr(sys.modules.get(top), "__file__", None) or ""
        for folder in PACKAGE_FOLDERS:
            base, separator, inside = file.partition(f"/{folder}/")
            if separator:
                package = f"{base}/{folder}/{top}"
                files += [package, f"{package}.libs"] if "/" in inside else [file]
    return sorted(path for path in files if os.path.exists(path))


def needed_paths() -> list[str]:
    """Return the paths without which programs cannot import."""
    return [*stdlib_folders(), *_loaded_packages()]


def run_rules(run_folder: str) -> list[tuple[str, int]]:
    """Return the paths that a run may open, each with its Landlock rights, its own folder first.

    Of the standard library it may read everything but the packages installed into it.
    """
    rules = [(run_folder, landlock.FOLDER_ACCESS)]
    for base in stdlib_folders():
        rules.append((base, landlock.READ_DIR))
        rules += [(entry.path, landlock.READ_ACCESS) for entry in os.scandir(base) if entry.name not in PACKAGE_FOLDERS]
    triple = sysconfig.get_config_var("MULTIARCH") or ""
    rules += [(path, landlock.READ_ACCESS) for path in (f"/lib/{triple}", f"/usr/lib/{triple}") if triple]
    rules += [(path, landlock.READ_ACCESS) for path in (*_C_LIBRARY_PATHS, *_LOCALE_PATHS, *_loaded_packages())]
    return rules + [(path, landlock.DEVICE_ACCESS) for path in _DEVICES]


def temporary_folder() -> str:
    """Return /tmp, where a run's folder may be mounted because programs often write there.

    Returns an empty text if the host has no /tmp, or if needed paths lie below it.
    """
    is_needed = any(path.startswith("/tmp/") for path in needed_paths())
    return "/tmp" if os.path.isdir("/tmp") and not is_needed else ""
