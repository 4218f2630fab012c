"""Names on the HuggingFace hub: its cache, its absence, and a server that stands in for it."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.tokenizer_files import is_hub_name
from tests.fork_server import run_python

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VOCABULARY = {"a": 0, "b": 1, "</s>": 2}
DOCUMENT = {
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "b"},
}
FILES = {
    "tokenizer.json": json.dumps(DOCUMENT),
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": json.dumps({"eos_token": "a"}),
    "chat_template.jinja": "{{ messages }}",
}
PRINT_TOKENIZERS = """
import sys
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
for name in sys.argv[1:]:
    try:
        tokenizer = build_tokenizer(TokenizerConfig(model=name))
        print(tokenizer.tokenize("a b"), tokenizer.eos_id, tokenizer.chat_template)
    except TokenizerError as error:
        print(error)
"""
PRINTED = "[0, 1] 0 {{ messages }}"


def cached(home: Path, name: str, files: Mapping[str, str]) -> None:
    """Lay ``files`` out as the hub's library does."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for i, (file, content) in enumerate(files.items()):
        (repository / "blobs" / f"{i}").write_text(content, encoding="utf-8")
        (snapshot / file).symlink_to(repository / "blobs" / f"{i}")


def printed(home: Path, *names: str, **environment: str) -> list[str]:
    """What a process of its own prints about each tokenizer: its ids, or its one line of error."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(home), **environment}
    return run_python(PRINT_TOKENIZERS, *names, env=environment).stdout.splitlines()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as fetching a repository takes."""

    repositories: Mapping[str, Mapping[str, str]]
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0].removeprefix("/")
        self.asked.append(path)
        for name, files in self.repositories.items():
            if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
                siblings = [{"rfilename": file} for file in files]
                return self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}))
            if path == f"api/models/{name}/tree/{COMMIT}":
                rows = [
                    {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                    for file, content in files.items()
                ]
                return self._send(json.dumps(rows))
            for file, content in files.items():
                if path == f"{name}/resolve/{COMMIT}/{file}":
                    return self._send(content)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{abs(hash(content)):x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content.encode())

    def log_message(self, *_: object) -> None:
        """Nothing: the requests are in ``asked``."""


@contextmanager
def served(repositories: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, type[Hub]]]:
    """Address of a hub with these files of repositories, and what answers there."""
    handler = type("OneHub", (Hub,), {"repositories": repositories, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    """A hub with a tokenizer and with a model that has none."""
    repositories = {
        "org/whole": {**FILES, "model.safetensors": "weights"},
        "org/weights": {"model.safetensors": "weights", "sub/tokenizer.json": "{}"},
    }
    with served(repositories) as found:
        yield found


OUT_OF_REACH = {
    "offline": {"HF_HUB_OFFLINE": "1"},
    # Nobody listens at this address.
    "no-network": {"HF_ENDPOINT": "http://127.0.0.1:9"},
}


@pytest.mark.parametrize("environment", OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_out_of_reach_what_is_cached_is_read_and_what_is_not_is_one_clear_error_soon(
    tmp_path, environment
):
    for name in ("one", "org/two"):
        cached(tmp_path, name, FILES)
    cached(tmp_path, "org/part", {"tokenizer.json": FILES["tokenizer.json"]})
    begin = time.perf_counter()
    *whole, part, message = printed(
        tmp_path, "one", "org/two", "org/part", "org/none", **environment
    )
    assert time.perf_counter() - begin < 20
    assert whole == [PRINTED] * 2
    assert part == "[0, 1] 2 None"
    assert message.startswith("org/none: the tokenizer does not exist; got no such f")
    assert message.endswith("or a name on the HuggingFace hub")


def test_what_is_missing_is_fetched_once_and_weights_never(tmp_path, hub):
    address, server = hub
    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(printed, tmp_path, "org/whole", HF_ENDPOINT=address) for _ in "12"]
        assert [rank.result() for rank in both] == [[PRINTED]] * 2
    assert not [path for path in server.asked if "safetensors" in path]
    server.asked.clear()
    again, *messages = printed(
        tmp_path, "org/whole", "org/weights", "org/none", HF_ENDPOINT=address
    )
    assert again == PRINTED
    assert not [path for path in server.asked if "org/whole" in path]
    # The hub's answer is in the error.
    reasons = {"org/weights": "there is no tokenizer in it", "org/none": "404"}
    for message, (name, reason) in zip(messages, reasons.items(), strict=True):
        assert message.startswith(f"{name}: the tokenizer does not exist; got no such file or dir")
        assert f"; the hub: {reason}" in message


def test_a_name_of_megatrons_comes_from_the_hub_or_names_the_files_to_pass(tmp_path, monkeypatch):
    import huggingface_hub.constants as hub_constants

    from megatron_ext.tokenizers.libraries.megatron import MegatronHFTokenizer

    cached(tmp_path, "gpt2", FILES)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    ours = MegatronHFTokenizer("GPT2BPETokenizer")
    assert (ours.text_to_ids("a b"), ours.chat_template) == ([0, 1], "{{ messages }}")
    for name, message in (
        ("BertWordPieceCase", r"got bert-large-cased: .*; pass vocab_file \(--vocab-file\)"),
        ("biomegatron-bert-345m-cased", r"needs its vocabulary; pass vocab_file"),
    ):
        with pytest.raises(TokenizerError, match=message):
            MegatronHFTokenizer(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gpt2", True),
        ("meta-llama/Llama-3.2-1B", True),
        ("models/tokenizer.model", False),
        ("tokenizer.json", False),
        ("/data/gpt2", False),
        ("./gpt2", False),
        ("../gpt2", False),
        ("a/b/c", False),
        ("a b", False),
        ("a/..", False),
        ("", False),
    ],
)
def test_a_path_is_told_from_a_name(path, expected):
    assert is_hub_name(path) == expected
