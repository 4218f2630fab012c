"""Constants that several layers share, and the version; nothing else is imported here."""

from typing import Final

__version__ = "0.1.0"

DELTA_CHUNK: Final = 64
"""Positions of a chunk of linear attention, whose corrections are solved for at a time."""

IGNORE_INDEX: Final = -100
"""Label of a position that is not trained."""

INT4_GROUP: Final = 32
"""Most columns of a weight that have a scale and a zero of their own, in int4."""

MAX_RECORD_MIB: Final = 256
"""MiB of a record of data, unless another limit is given."""

NO_CHUNK: Final = -1
"""Chunk id of a token in no chunk, such as padding or an unpaired control token."""

ON_HOST: Final = {"on_host": True}
"""Metadata of a dataclass's field whose tensors stay on the host where the others are uploaded."""
