"""Seeds that go to no device which is not there.

``torch.manual_seed`` keeps them for a later start of each kind of device, with the text of the
stack: half a millisecond for every test, and for every seed that a run sets.
"""

import torch


def seed_no_absent_device():
    """Let ``torch.manual_seed`` seed the CPU and what devices there are."""
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None
