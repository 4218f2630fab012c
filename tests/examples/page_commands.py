"""The commands of a page, as a shell would read them."""

import re
import shlex

_SHELL = re.compile(r"^```bash\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def commands(page):
    """The words of each, in order."""
    blocks = _SHELL.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.strip()]


def verb_of(words):
    """The verb of a command of this package with its arguments, also where torchrun starts it."""
    if words[0] == "megatron-ext":
        return words[1:]
    if words[0] == "torchrun":
        return words[words.index("megatron_ext") + 1 :]
    return None
