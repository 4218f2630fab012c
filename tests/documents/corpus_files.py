"""The same documents in every kind of file."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS = ("one line", "日本語\nと emoji 😀", " leads with a space", "x" * 300, "é", "the last")


def write_lines(path, texts=DOCUMENTS):
    """JSON lines, compressed where the name says so."""
    content = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_marked(path):
    """JSON lines as Windows writes them: a byte-order mark, carriage returns and blank lines."""
    lines = write_lines(path).read_bytes().replace(b"\n", b"\r\n\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + lines)
    return path


def write_list(path):
    """A JSON list over several lines."""
    path.write_text(json.dumps([{"text": text} for text in DOCUMENTS], indent=1))
    return path


def write_parquet(path, texts=DOCUMENTS):
    """Row groups of two rows."""
    pq.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), path, row_group_size=2)
    return path


def write_arrow(path):
    """An IPC file with batches of four rows."""
    table = pa.table({"text": DOCUMENTS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def write_stream(path):
    """An IPC stream, with strings whose offsets have 64 bits."""
    table = pa.table({"text": pa.array(DOCUMENTS, pa.large_string())})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


KINDS = {
    "lines.jsonl": write_lines,
    "marked.jsonl": write_marked,
    "lines.json.gz": write_lines,
    "list.json": write_list,
    "rows.parquet": write_parquet,
    "file.arrow": write_arrow,
    "stream.arrow": write_stream,
}
