"""The main module of a process that a script spawned: the script, with patches installed.

``multiprocessing`` runs it under the name ``__mp_main__`` and takes its names for the script's, so
all of its own names start with an underscore.
"""

import os as _os
from pathlib import Path as _Path

from megatron_ext.megatron_lm.script import SCRIPT_VARIABLE as _SCRIPT_VARIABLE
from megatron_ext.megatron_lm.script import install as _install

if __name__ == "__mp_main__":
    _install()
    __file__ = _os.environ[_SCRIPT_VARIABLE]
    exec(compile(_Path(__file__).read_bytes(), __file__, "exec", dont_inherit=True), globals())
