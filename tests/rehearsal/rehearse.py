"""``LD_PRELOAD=GUARD python -m tests.rehearsal.rehearse FOLDER REQUEST``: runs what is asked for.

The request is JSON: ``losses``, ``microbatches`` and ``torch`` list names of objectives, ``runs``
names of runs by the number of their ranks, ``{"1": [...], "2": [...]}``, each in a folder of that
name, and ``verbs`` is whether to run the verbs, in the folder ``verbs``. The answer is written to
``FOLDER/answer.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# No process that this one starts pretends, too.
del os.environ["LD_PRELOAD"]
os.environ["TRITON_INTERPRET"] = "1"


def main(folder: Path, request: dict[str, Any]) -> None:
    """Answer one request."""
    from tests.rehearsal.pretending import pretend

    pretend()
    from tests.rehearsal.ranks import answers_of, start_ranks
    from tests.rehearsal.rehearsed_losses import rehearse_loss
    from tests.rehearsal.rehearsed_microbatches import kernels_by_torch, rehearse_microbatch
    from tests.rehearsal.rehearsed_verbs import rehearse_verbs
    from tests.triton_interpreter import interpret_quickly

    interpret_quickly()

    # Before the first operation, and beside the losses.
    started = {
        count: start_ranks(folder / count, names, int(count))
        for count, names in request["runs"].items()
    }
    losses = {name: rehearse_loss(name) for name in request["losses"]}
    microbatches = {name: rehearse_microbatch(name) for name in request["microbatches"]}
    by_torch = {name: kernels_by_torch(name) for name in request["torch"]}
    runs = {count: answers_of(ranks) for count, ranks in started.items()}
    verbs = rehearse_verbs(folder / "verbs") if request["verbs"] else {}
    answer = {
        "losses": losses,
        "microbatches": microbatches,
        "torch": by_torch,
        "runs": runs,
        "verbs": verbs,
    }
    (folder / "answer.json").write_text(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
