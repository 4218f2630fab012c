"""A server that answers as vLLM and SGLang do, from a model that is a table.

The shapes of its answers are those of vLLM 0.32, recorded from ``vllm serve``, and of SGLang 0.5,
by its documentation.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCAB_SIZE = 2001
WORDS = 500
"""First id that is neither a control token nor a byte in the vocabulary of tiny runs."""


def log_probs_after(ids, vocab_size=VOCAB_SIZE):
    """[V] of the next token: of a table by the last two ids."""
    draw = np.random.default_rng([ids[-1], ids[-2] if len(ids) > 1 else 0])
    logits = 3 * draw.standard_normal(vocab_size)
    return logits - np.logaddexp.reduce(logits)


def sample(ids, count, stops):
    """Ids and log-probabilities, each time the likeliest of those that are whole words or parts."""
    new, found = [], []
    while len(new) < count:
        log_probs = log_probs_after([*ids, *new])
        new.append(WORDS + int(log_probs[WORDS:].argmax()))
        found.append(float(log_probs[new[-1]]))
        if new[-1] in stops:
            break
    return new, found


def vllm_answer(body):
    """Of ``/v1/completions``."""
    ids, top_k = body["prompt"], body.get("prompt_logprobs")
    new, found = sample(ids, body["max_tokens"], body.get("stop_token_ids") or ())
    rows = None
    if top_k is not None:
        rows = [None]
        for at in range(1, len(ids)):
            log_probs = log_probs_after(ids[:at])
            order = np.argsort(-log_probs, kind="stable")
            ranks = {int(i): rank for rank, i in enumerate(order[:top_k], 1)}
            ranks.setdefault(ids[at], int((log_probs > log_probs[ids[at]]).sum()) + 1)
            rows.append(
                {
                    str(i): {"logprob": float(log_probs[i]), "rank": rank, "decoded_token": None}
                    for i, rank in ranks.items()
                }
            )
    choice = {
        "index": 0,
        "text": "",
        "logprobs": {"token_logprobs": found, "tokens": [f"token_id:{i}" for i in new]},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": new,
        "prompt_logprobs": rows,
        "prompt_token_ids": ids,
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}


def sglang_answer(body):
    """Of ``/generate``."""
    ids, parameters = body["input_ids"], body["sampling_params"]
    stops = parameters.get("stop_token_ids") or ()
    new, found = sample(ids, parameters["max_new_tokens"], stops)
    meta = {
        "prompt_tokens": len(ids),
        "completion_tokens": len(new),
        "finish_reason": {"type": "length", "length": len(new)},
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(found, new, strict=True)],
    }
    if body["logprob_start_len"] == 0:
        top_k = body.get("top_logprobs_num", 0)
        rows = [log_probs_after(ids[:at]) for at in range(1, len(ids))]
        meta["input_token_logprobs"] = [[None, ids[0], None]] + [
            [float(row[i]), i, None] for row, i in zip(rows, ids[1:], strict=True)
        ]
        meta["input_top_logprobs"] = [None] + [
            [[float(row[i]), int(i), None] for i in np.argsort(-row, kind="stable")[:top_k]]
            for row in rows
        ]
    return {"text": "", "output_ids": new, "meta_info": meta}


ANSWERS = {"/v1/completions": vllm_answer, "/generate": sglang_answer}


class StandIn:
    """What a server was asked, and how it misbehaves.

    Attributes:
        requests: Path, body and headers of each POST.
        change: Changes an answer before it is sent.
        statuses: Status of the next answers, before 200.
        headers: Headers of answers of another status than 200.
        meet: Called with path and body of each POST in a thread of its own; status of the answer.
    """

    def __init__(self):
        self.requests = []
        self.change = lambda answer: answer
        self.statuses = []
        self.headers = {}
        self.meet = lambda path, body: 200
        self.models = [{"id": "m", "object": "model", "max_model_len": 4096}]
        self.url = ""

    def paths(self):
        return [path for path, _, _ in self.requests]


@contextmanager
def serving():
    """A stand-in behind a port of this machine."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.answer({"object": "list", "data": stand_in.models})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.requests.append((self.path, body, dict(self.headers)))
            status = stand_in.statuses.pop(0) if stand_in.statuses else 200
            status = max(status, stand_in.meet(self.path, body))
            if status != 200:
                self.answer({"error": {"message": "not now"}}, status)
                return
            answer = ANSWERS.get(self.path, lambda _: {"success": True})
            self.answer(stand_in.change(answer(body)))

        def answer(self, values, status=200):
            content = values if isinstance(values, bytes) else json.dumps(values).encode()
            self.send_response(status)
            headers = {} if status == 200 else stand_in.headers
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
