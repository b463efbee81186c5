"""Makes the checkout importable as the installed package: links for the folders, and the entry points.

Usage: link_checkout.py SITE
"""

import sys
import tomllib
from pathlib import Path


def link(root: Path, site: Path) -> None:
    """Fills `site` with a package `difftest` of links into `root`, and its metadata from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    package = site / "difftest"
    package.mkdir(exist_ok=True)
    folders = {item.name: item for item in (root / "difftest").iterdir() if item.name != "__pycache__"}
    folders |= {name: root / name for name in ("reference", "kernels", "cases")}
    for name, target in folders.items():
        (package / name).unlink(missing_ok=True)
        (package / name).symlink_to(target)
    info = site / f"difftest-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: difftest\nVersion: {project['version']}\n")
    points = {**project["entry-points"], "console_scripts": project["scripts"]}
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in items.items())
        for group, items in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))


if __name__ == "__main__":
    link(Path.cwd(), Path(sys.argv[1]))
