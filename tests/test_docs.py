"""The documentation says what is so: programs run, links lead somewhere, references are current."""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fork_server import run_forked

ROOT = Path(__file__).parents[1]
HOMES = (ROOT, ROOT / "megatron_ext")
SITE = """
import socket, sys

def refuse(*address):
    raise AssertionError(f"a connection to {address}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli

cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""
"""``mkdocs build`` without a network."""

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "megatron_ext").glob("**/README.md")),
]
PROGRAM = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
"""A Python block, and the text block right after it, which is what the program prints."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([a-z_]+/[\w./-]+\.py)`")
CODE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)


def programs():
    return [
        pytest.param(*match.groups(), id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, match in enumerate(PROGRAM.finditer(page.read_text(encoding="utf-8")), 1)
    ]


def links(page):
    """Where a page leads to within the repository."""
    found = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [link for link in found if not link.startswith(("http://", "https://"))]


@pytest.mark.parametrize(("program", "output"), programs())
def test_a_program_in_the_documentation_prints_what_is_said(program, output, tmp_path):
    code, printed, errors = run_forked(tmp_path, exec, program, {"__name__": "__main__"})
    assert code == 0, errors
    if output is not None:
        assert printed == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in headings(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("tokenizer_tables", "tokenizers_page"),
        ("configuration", "configuration_page"),
        ("notebook", "notebook_of_the_page"),
        ("performance", "performance_page"),
        ("megatron_core", "megatron_core_page"),
        ("prompt_formats", "prompt_formats_page"),
    ],
)
def test_a_generated_page_is_current(name, made):
    script = runpy.run_path(str(ROOT / "docs" / f"generate_{name}.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script[made](), (
        f"run: python docs/generate_{name}.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_source_file_that_a_page_names_is_there(page):
    named = set(SOURCE.findall(CODE.sub("", page.read_text(encoding="utf-8"))))
    # A folder that is not ours is one of Megatron-LM's.
    homes = [(path, home) for path in named for home in HOMES if (home / path).parents[0].exists()]
    assert not [path for path, home in homes if not (home / path).exists()]


@pytest.mark.parametrize(
    "feature",
    ["experts", "data sets by name"],
)
def test_the_readme_names_what_related_projects_have_and_this_one_lacks(feature):
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Not yet\n")
    assert feature in rest.partition("\n## ")[0]


def test_the_figures_of_the_readme_are_those_of_the_raw_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        for name in ("alignment", "projection")
    }
    code = {r["student_tokens"]: r for r in results["alignment"] if r["text"] == "source code"}
    pair, *_ = results["projection"]
    for figure in (
        f"{code[4096]['ms_median']:.2f} ms",
        f"{code[1_000_000]['ms_median']:.0f} ms",
        f"{pair['seconds_median']:.1f} s, {pair['peak_mib']:.0f} MiB peak",
    ):
        assert f"| {figure} |" in readme
    steps = json.loads((ROOT / "benchmarks" / "results" / "peer_gold.json").read_text())
    ours, theirs = (steps[side]["seconds_per_step"] for side in ("ours", "trl"))
    assert f"`GOLDTrainer` takes {theirs:.1f} s | {ours:.1f} s |" in readme
    setting = {"pair": "Llama 3.2 x Qwen 3", "ranks": 1, "rows": 8192, "order": "co_sharded"}
    setting["objective"] = "projected_kl + next_token"
    losses = json.loads((ROOT / "benchmarks" / "results" / "losses.json").read_text())["rows"]
    costs = [
        next(
            f"{row['ms_median']:.{places}f} ms, {row['peak_bytes'] / 1e9:.1f} GB"
            for row in losses
            if row.items() >= {**setting, "implementation": implementation}.items()
        )
        for implementation, places in (("eager", 0), ("triton, in place", 1))
    ]
    eager, kernels = costs
    assert f"operations take {eager} | {kernels} |" in readme


def test_the_citation_is_of_this_version():
    import yaml

    from megatron_ext import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_number_of_objectives_is_that_of_the_registry():
    from megatron_ext.losses import LOSS_REGISTRY

    objectives = LOSS_REGISTRY.keys() - {"next_token"}
    across = objectives - {"vocab_kl"}
    readme, comparison = (
        path.read_text(encoding="utf-8")
        for path in (ROOT / "README.md", ROOT / "docs" / "comparison.md")
    )
    assert f"| objectives across tokenizers | {len(across)} |" in readme
    assert f"**Training**: {len(objectives)} objectives" in readme
    assert f"| objectives across tokenizers | {len(across)}: " in comparison


def test_the_readme_is_a_page_that_is_read_to_its_end():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_a_name_that_takes_the_place_of_one_of_nemo_rl_can_be_imported():
    import megatron_ext
    import megatron_ext.losses

    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| NeMo RL[^\n]*\n(?:\|[^\n]*\n)+", text, re.MULTILINE)
    ours = [row.rsplit("|", 2)[-2] for table in tables for row in table.splitlines()[2:]]
    classes = {name for cell in ours for name in re.findall(r"\b(?:[A-Z]\w*[a-z]){2}\w*", cell)}
    assert len(classes) > 2
    elsewhere = {"DataLoader", "PackedBatches", "PackedTextDataset"}
    homes = (megatron_ext, megatron_ext.losses)
    assert not {name for name in classes - elsewhere if not any(hasattr(h, name) for h in homes)}


def test_an_error_that_the_quickstart_explains_is_raised_somewhere():
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    _, _, table = page.partition("## When it does not start")
    explained = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(explained) > 5
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "megatron_ext").rglob("*.py"))
    texts = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert not [error for error in explained if not re.search(written(error), texts)]


@pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason='pip install "megatron-ext[docs]"',
)
def test_the_site_has_every_page_and_public_name_and_loads_nothing_from_elsewhere(tmp_path):
    import megatron_ext

    words = [sys.executable, "-c", SITE, str(tmp_path)]
    finished = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    pages = [page for page in PAGES if page.parent == ROOT / "docs"]
    assert all((tmp_path / "docs" / page.stem / "index.html").exists() for page in pages)
    named = (tmp_path / "reference" / "megatron_ext" / "index.html").read_text("utf-8")
    assert all(f"<code>{name}</code>" in named for name in megatron_ext._HOME_OF)
    losses = (tmp_path / "reference" / "losses" / "index.html").read_text("utf-8")
    assert 'id="megatron_ext.losses.GoldLoss"' in losses
    home = (tmp_path / "index.html").read_text("utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.https?://[^>]*", home)


def written(error):
    """Pattern of an error as it is in the source, where any word may be in braces."""
    braces = r"\{[^{}]*\}\S*"
    words = (re.escape(word) for word in error.split())
    return " ".join(braces if r"\.\.\." in word else f"(?:{word}|{braces})" for word in words)


def headings(markdown):
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
