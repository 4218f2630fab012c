"""Hooks of mkdocs: a site of the repository's pages, and a reference of its public names.

Pages keep the paths that they have in the repository, and what they link to comes along: other
pages, pictures, scripts, results. So a link that leads somewhere in the repository does so here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "megatron_ext"
INDEX: Final = "README.md"
LINK: Final = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)|(?:src|srcset)=\"([^\"]+)\"")
CODE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages of the repository and the reference in place of the folder ``docs``."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    pages = [ROOT / INDEX, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    pages += sorted((ROOT / "docs").glob("*.md"))
    for path in reachable(pages):
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            kept.append(File.generated(config, f"{name}/index.md", content=listing(path)))
        else:
            kept.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in reference():
        kept.append(File.generated(config, f"reference/{name}.md", content=text))
    return Files(kept)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to folders lead to their listings."""
    here = ROOT / page.file.src_uri

    def with_index(match: re.Match[str]) -> str:
        target = match[1]
        if target is None or not (here.parent / target).is_dir():
            return match[0]
        return f"]({target.rstrip('/')}/index.md)"

    return LINK.sub(with_index, markdown)


def reachable(pages: list[Path]) -> list[Path]:
    """The pages and all files and folders of the repository that they lead to, in order."""
    found = dict.fromkeys(pages)
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / (match[1] or match[3])).resolve()
            if path in found or not path.exists() or not path.is_relative_to(ROOT):
                continue
            found[path] = None
            if path.suffix == ".md":
                waiting.append(path)
            elif path.is_dir():
                files = [each for each in sorted(path.iterdir()) if each.is_file()]
                found.update(dict.fromkeys(files))
                waiting += [each for each in files if each.suffix == ".md"]
    return list(found)


def listing(folder: Path) -> str:
    """A page with the files of a folder."""
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    lines = [f"- [{name}]({name})" for name in names]
    return "\n".join([f"# {folder.relative_to(ROOT).as_posix()}", "", *lines, ""])


def reference() -> Iterator[tuple[str, str]]:
    """Name and text of each page of the reference; nothing is imported."""
    packages = [path.parent for path in sorted(PACKAGE.glob("*/__init__.py"))]
    documented = [path.name for path in packages if "__all__" in assigned(path / "__init__.py")]
    homes = assigned(PACKAGE / "__init__.py")["_HOME_OF"]
    assert isinstance(homes, dict)
    rows, own = [], []
    for name, home in sorted(homes.items()):
        package = home.split(".")[1]
        target = f"{package}.md" if package in documented else f"#{home}.{name}"
        link = f"[`{home}`]({target})"
        rows.append(f"| `{name}` | {link} |")
        if package not in documented:
            own.append(f"::: {home}.{name}\n")
    head = ["# Names of megatron_ext", "", "| name | defined in |", "|---|---|"]
    yield "megatron_ext", "\n".join([*head, *rows, "", *own])
    for package in documented:
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        title = f"# megatron_ext.{package}"
        yield package, f"{title}\n\n::: megatron_ext.{package}\n{options}"


def assigned(path: Path) -> dict[str, object]:
    """The literals that a module assigns to names at its top."""
    values = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                values[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
    return values
