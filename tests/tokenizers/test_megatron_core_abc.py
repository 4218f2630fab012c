"""Our tokenizers pass megatron-core's isinstance checks, whichever package is imported first.

Stand-ins are laid out as megatron-core is, which takes seconds to import; the real classes are met
where its datasets are.
"""

from pathlib import Path

import pytest

from tests.fork_server import run_python

CLASSES = {
    "megatron/core/tokenizers/base_tokenizer.py": "MegatronTokenizerBase",
    "megatron/core/tokenizers/text/text_tokenizer.py": "MegatronTokenizerText",
    "megatron/core/tokenizers/text/libraries/abstract_tokenizer.py": (
        "MegatronTokenizerTextAbstract"
    ),
    "megatron/core/tokenizers/vision/vision_tokenizer.py": "MegatronTokenizerVision",
}
BUILD = """
from megatron_ext.tokenizers import DefaultTokenizerVision, MegatronTokenizer, MegatronTokenizerText
text = MegatronTokenizerText(None, {"library": "byte-level"})
vision = DefaultTokenizerVision(None, {"library": "byte-level"})
"""
IMPORT = """
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText as TheirText
from megatron.core.tokenizers.text.libraries.abstract_tokenizer import (
    MegatronTokenizerTextAbstract,
)
from megatron.core.tokenizers.vision.vision_tokenizer import MegatronTokenizerVision
"""
CHECK = """
assert isinstance(text, MegatronTokenizerBase) and isinstance(text, TheirText)
assert isinstance(text._tokenizer, MegatronTokenizerTextAbstract)
assert isinstance(vision, MegatronTokenizerVision) and isinstance(vision, TheirText)
assert not isinstance(text, MegatronTokenizerVision)
assert not isinstance("text", MegatronTokenizerBase)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    for name, class_name in CLASSES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "from abc import ABC, abstractmethod\n"
            f"class {class_name}(ABC):\n"
            "    @abstractmethod\n"
            "    def vocab(self): ...\n",
            encoding="utf-8",
        )
        for folder in file.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def run(code: str, folder: Path) -> None:
    """Run ``code`` with a package named megatron in ``folder``."""
    run_python(f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}")


@pytest.mark.parametrize(
    "code", [BUILD + IMPORT + CHECK, IMPORT + BUILD + CHECK], ids=["ours-first", "theirs-first"]
)
def test_both_import_orders_make_ours_count_as_theirs(stand_in, code):
    run(code, stand_in)


def test_a_tokenizer_that_was_pickled_elsewhere_counts_before_one_is_built(stand_in):
    run(
        "import pickle, subprocess\n"
        + BUILD
        + "blob = pickle.dumps((text, vision))\n"
        + f"code = '''import sys; sys.path.insert(0, {str(stand_in)!r})\n"
        + "import pickle; text, vision = pickle.load(sys.stdin.buffer)\n"
        + f"{IMPORT}{CHECK}'''\n"
        + "subprocess.run([sys.executable, '-c', code], input=blob, check=True)\n",
        stand_in,
    )


def test_megatron_core_is_not_imported_for_it_and_registering_again_changes_nothing(tmp_path):
    run(
        BUILD
        + "assert not [name for name in sys.modules if name.startswith('megatron.')]\n"
        + "from megatron_ext.tokenizers import register_with_megatron_core\n"
        + "before = list(sys.meta_path)\n"
        + "register_with_megatron_core()\n"
        + "assert sys.meta_path == before\n",
        tmp_path,
    )


def test_the_watched_modules_are_as_if_nobody_had_watched(stand_in):
    run(
        BUILD
        + IMPORT
        + "import importlib, inspect\n"
        + "module = sys.modules['megatron.core.tokenizers.base_tokenizer']\n"
        + "assert type(module.__loader__).__name__ == 'SourceFileLoader'\n"
        + "assert module.__spec__.loader is module.__loader__\n"
        + "assert 'abstractmethod' in inspect.getsource(module)\n"
        + "importlib.reload(module)\n"
        + "assert isinstance(text, module.MegatronTokenizerBase)\n",
        stand_in,
    )


def test_a_release_without_these_classes_is_left_alone(tmp_path, stand_in):
    for name in CLASSES:
        (stand_in / name).write_text("class Other: ...\nMegatronTokenizerBase = 3\n")
    run(BUILD + "import megatron.core.tokenizers.base_tokenizer as b; assert b.Other", stand_in)
    (stand_in / "megatron/core/tokenizers/base_tokenizer.py").unlink()
    run(
        BUILD
        + "try:\n    import megatron.core.tokenizers.base_tokenizer\n"
        + "except ModuleNotFoundError as error:\n"
        + "    assert error.name == 'megatron.core.tokenizers.base_tokenizer'\n"
        + "else:\n    raise SystemExit('found')\n",
        stand_in,
    )
