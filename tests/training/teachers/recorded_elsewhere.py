"""What vLLM and DistillKit would record of a tiny model, written by plain torch."""

import json

import numpy as np
import torch

TEXTS = [
    "the theory of the other thing then there " * (1 + i % 3) + "the" * (i % 2) for i in range(9)
]


def ids_of(folder, texts=TEXTS):
    """Ids of the texts as the teacher reads them: between the tokens of begin and end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [[begin, *tokenizer(text)["input_ids"], end] for text in texts]


def log_probs_of(folder, ids, vocab_size, *, temperature=1.0):
    """[T, V] fp32 of each text, behind each of its ids; V are the tokenizer's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0, :, :vocab_size] for text in ids]
    return [(each / temperature).log_softmax(dim=-1) for each in logits]


def prompt_logprobs(ids, log_probs, top_k):
    """vLLM's rows: the token of the text first, then the likeliest, of which one may be it."""
    rows = [None]
    for at in range(1, len(ids)):
        row = log_probs[at - 1]
        top = row.topk(top_k)
        own = ids[at]
        entries = {own: (row[own].item(), int((row >= row[own]).sum()))}
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        entries |= {i: (value, rank) for rank, (i, value) in enumerate(pairs, 1)}
        rows.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": f"<{i}>"}
                for i, (value, rank) in entries.items()
            }
        )
    return rows


def request_output(ids, rows):
    """A ``RequestOutput`` as JSON."""
    return {
        "request_id": "0",
        "prompt": None,
        "prompt_token_ids": ids,
        "prompt_logprobs": rows,
        "outputs": [{"index": 0, "text": "", "token_ids": [5], "finish_reason": "length"}],
        "finished": True,
    }


def flat_output(ids, rows):
    """The same with ``flat_logprobs``, where a token of the text among the likeliest is twice."""
    flat = {"start_indices": [], "end_indices": [], "token_ids": [], "logprobs": [], "ranks": []}
    for at, row in enumerate(rows):
        flat["start_indices"].append(len(flat["ranks"]))
        own = str(ids[at])
        entries = [] if row is None else [(own, row[own]), *row.items()]
        for token, entry in entries:
            flat["token_ids"].append(int(token))
            flat["logprobs"].append(entry["logprob"])
            flat["ranks"].append(entry["rank"])
        flat["end_indices"].append(len(flat["ranks"]))
    return request_output(ids, {**flat, "decoded_tokens": [None] * len(flat["ranks"])})


def completions_answer(ids, rows):
    """An answer of ``/v1/completions``."""
    choice = {"index": 0, "text": "", "prompt_logprobs": rows, "prompt_token_ids": ids}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def batch_line(ids, rows):
    """A line of ``vllm run-batch``: an answer of ``/v1/chat/completions``."""
    body = {"object": "chat.completion", "choices": [{"index": 0, "message": {}}]}
    body |= {"prompt_logprobs": rows, "prompt_token_ids": ids}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "vllm-1", "custom_id": "1", "response": response, "error": None}


def write_lines(path, records):
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def packed(values, bits):
    """Integers [R, N] as bytes, the first bit the most significant."""
    each = (values[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(each.reshape(len(values), -1).astype(np.uint8), axis=1)


def capture_row(ids, log_probs, top_k, vocab_size, *, exact=torch.float32):
    """A row of DistillKit's capture with all K exact: predictions of all ids but the last."""
    top = log_probs[: len(ids) - 1].topk(top_k)
    bits = int(np.ceil(np.log2(vocab_size)))
    stored = top.values.to(exact).contiguous()
    return {
        "input_ids": ids,
        "compressed_logprobs": stored.view(torch.uint8).view(len(stored), -1).tolist(),
        "bytepacked_indices": packed(top.indices.numpy(), bits).tolist(),
    }
