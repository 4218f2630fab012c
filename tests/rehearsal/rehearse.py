"""``LD_PRELOAD=GUARD python -m tests.rehearsal.rehearse FOLDER REQUEST``: runs what is asked for.

The request is JSON, ``{"losses": [...], "runs": [...]}``; the answer is written to
``FOLDER/answer.json``.
"""

import json
import os
import sys
import time
from pathlib import Path

# No process that this one starts pretends, too.
del os.environ["LD_PRELOAD"]
os.environ["TRITON_INTERPRET"] = "1"


def main(folder: Path, request: dict[str, list[str]]) -> None:
    """Answer one request."""
    from tests.rehearsal.pretending import pretend

    pretend()
    from tests.rehearsal.rehearsed_losses import rehearse_loss
    from tests.triton_interpreter import interpret_quickly

    interpret_quickly()

    answer = {"losses": {name: rehearse_loss(name) for name in request["losses"]}, "runs": {}}
    if request["runs"]:
        from tests.rehearsal.rehearsed_runs import rehearse_runs

        answer["runs"] = rehearse_runs(folder, request["runs"])
    answer["seconds"] = time.process_time()
    (folder / "answer.json").write_text(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
