"""Programs that try to leave the jail of generated code; one that passes has succeeded."""

# ruff: noqa: E501

import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from megatron_ext.evaluation import sandbox
from megatron_ext.evaluation.sandbox import Limits, Outcome

LIMITS = Limits(seconds=3, memory_bytes=256 << 20, disk_bytes=1 << 20)

_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_PAGES = "block = mmap.mmap(-1, 200 << 20)\nfor i in range(0, len(block), 4096): block[i] = 1\n"

PROGRAMS = {
    # Files of the machine; PLACE is a folder outside that everybody may write to.
    "reads the users": "open('/etc/passwd').read()",
    "reads root's home": "import os\nassert any(name != '.pyenv' for name in os.listdir('/root'))",
    "reads the machine's environment": "open('/proc/1/environ', 'rb').read()",
    "reads the kernel's log": "open('/dev/kmsg').read(1)",
    "lists processes": "import os\nassert any(name.isdigit() for name in os.listdir('/proc'))",
    "lists folders of others": "import os\nassert set(os.listdir('/')) & {'home', 'var', 'run', 'mnt', 'boot', 'sys', 'opt'}",
    "reads a victim": "open('PLACE/victim').read()",
    "writes a file outside": "open('PLACE/leak', 'w').write('x')",
    "writes into a FIFO": "open('PLACE/fifo', 'w').write('x')",
    "writes to Python's folder": "import os\nopen(os.__file__, 'a').write('x')",
    "adds to Python's folder": "import os\nopen(os.path.dirname(os.__file__) + '/new.py', 'w')",
    "removes from Python's folder": "import os\nos.unlink(os.__file__)",
    "makes a folder in the root": "import os\nos.mkdir('/new')",
    "climbs out of the root": "import os\nos.chdir('/')\nfor i in range(99): os.chdir('..')\n"
    "open('etc/passwd')",
    "opens a disk": "import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))\nopen('/tmp/disk', 'rb')",
    "runs a program of the machine": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    # Sockets.
    "unix socket by path": "import socket\nsocket.socket(socket.AF_UNIX).connect('PLACE/socket')",
    "abstract unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')",
    "datagram unix socket": "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "loopback": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "internet": "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
    "own server": "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
    "socket.create_connection(s.getsockname(), 1)",
    "netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM)",
    "packet": "import socket\nsocket.socket(17, socket.SOCK_RAW)",
    "raw": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    # System calls.
    "new namespaces": f"{_LIBC}assert libc.unshare(0x10000000) == 0",
    "clone with namespaces": f"{_LIBC}assert libc.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0",
    "clone3": f"{_LIBC}assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() != 38",
    "keeps a right": f"{_LIBC}data = (ctypes.c_uint32 * 6)()\n"
    "assert libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data) == 0 and any(data)",
    "mount": f"{_LIBC}assert libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "remount": f"{_LIBC}assert libc.mount(None, b'/', None, 32 | 4096, None) == 0",
    "unmount": f"{_LIBC}assert libc.umount2(b'/tmp', 2) == 0",
    "chroot": "import os\nos.chroot('/tmp')",
    "ptrace of the parent": f"{_LIBC}assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "memory of the parent": f"{_LIBC}assert libc.syscall(310, os.getppid(), 0, 0, 0, 0, 0) == 0",
    "io_uring": f"{_LIBC}assert libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0",
    "keyring": f"{_LIBC}assert libc.syscall(250, 0, -3, 1) != -1",
    "bpf": f"{_LIBC}assert libc.syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0",
    "perf": f"{_LIBC}assert libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0",
    "userfaultfd": f"{_LIBC}assert libc.syscall(323, 1) >= 0",
    "handles of files": f"{_LIBC}assert libc.syscall(304, -100, ctypes.create_string_buffer(64), 0) >= 0",
    "another set of calls": f"{_LIBC}assert libc.syscall(0x40000000 + 39) > 0",
    "set-user rights": "import os\nos.setuid(0)",
    "host name": "import socket\nsocket.sethostname('x')",
    "kills the jail": "import os\nos.kill(1, 9)\nraise SystemExit",
    "kills all": "import os\nos.kill(-1, 9)\nos._exit(0)",
    "kills a process outside": "import os\nos.kill(PID, 0)\nassert PID > 64",
    "stops its parent": "import os, time\nos.kill(os.getppid(), 19)\ntime.sleep(99)",
    # Memory, disk, processes, time, output.
    "memory of one": "x = bytearray(300 << 20)",
    "memory of children": f"import mmap, os, time\nfor i in range(4):\n  if not os.fork():\n"
    f"    {_PAGES.replace(chr(10), chr(10) + '    ', 1)}    time.sleep(9)\ntime.sleep(9)",
    "memory shared by children": f"import mmap, os, time\n{_PAGES}if os.fork(): {_PAGES.splitlines()[0]}\n"
    "for i in range(0, len(block), 4096): block[i] = 1\ntime.sleep(1)",
    "memory of hidden children": f"{_LIBC}import mmap, time\nlibc.prctl(4, 0)\nfor i in range(4):\n"
    f"  if not os.fork():\n    {_PAGES.replace(chr(10), chr(10) + '    ', 1)}    time.sleep(9)\ntime.sleep(9)",
    "memory in files": "import os\nfor i in range(24): os.memfd_create(str(i))",
    "memory of System V": f"{_LIBC}assert libc.shmget(0, 1 << 30, 0o1777) >= 0",
    "memory in pipes": "import os\nfor i in range(99): os.pipe()",
    "full disk": "for i in range(9): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 19))",
    "many files": "for i in range(2000): open(f'/tmp/{i}', 'w')",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "detached": "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(99)\nraise SystemExit",
    "sleep": "import time\ntime.sleep(99)",
    "endless loop": "while True: pass",
    "ignores signals": "import signal, time\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "much output": "import os\nwhile True: os.write(2, b'\\x1b]0;x\\x07' * 999)",
    "leaves early": "import os\nos._exit(0)",
}

CORE = (
    "reads the users",
    "reads a victim",
    "writes into a FIFO",
    "unix socket by path",
    "abstract unix socket",
    "netlink",
    "new namespaces",
    "clone with namespaces",
    "another set of calls",
    "mount",
    "keeps a right",
    "io_uring",
    "memory of children",
    "memory in files",
    "memory of System V",
    "runs a program of the machine",
    "kills a process outside",
)

HONEST = {
    "asyncio": "import asyncio\nasyncio.run(asyncio.sleep(0))",
    "processes": "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool:\n"
    "  assert pool.map(abs, [-1, 2]) == [1, 2]",
    "threads": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "Python of its own": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''], check=True)",
    "files": "import tempfile\nwith tempfile.TemporaryDirectory() as f: open(f + '/x', 'w').write('x')",
    "packages": "import sqlite3, decimal, ssl, ctypes, zoneinfo, numpy\nzoneinfo.ZoneInfo('UTC')",
}


@contextmanager
def surroundings() -> Iterator[dict[str, str]]:
    """A victim, a FIFO and servers outside, in a folder that everybody may write to; by words."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as port:
        place = Path(folder)
        place.chmod(0o777)
        (place / "victim").write_text("whole")
        os.mkfifo(place / "fifo")
        (place / "fifo").chmod(0o666)
        holder = os.open(place / "fifo", os.O_RDWR)
        servers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for server, address in zip(servers, (folder + "/socket", f"\0{folder}"), strict=True):
            server.bind(address)
            server.listen()
        (place / "socket").chmod(0o777)
        child = threading.get_native_id()
        yield {
            "PLACE": folder,
            "ABSTRACT": folder,
            "PORT": str(port.getsockname()[1]),
            "PID": str(child),
        }
        for server in servers:
            server.close()
        os.close(holder)


def ways() -> tuple[str | None, ...]:
    """Path of a bubblewrap, if it holds programs here; and None, for namespaces of our own."""
    found = sandbox.usable_bubblewrap()
    return (found, None) if found else (None,)


@contextmanager
def by(way: str | None) -> Iterator[None]:
    """Hold programs in one of the two ways."""
    with mock.patch.object(sandbox, "usable_bubblewrap", return_value=way):
        yield


def tried(program: str, words: dict[str, str]) -> Outcome:
    """The outcome of a program in its surroundings."""
    for word, value in words.items():
        program = program.replace(word, value)
    return sandbox.run_program(program, LIMITS)


def left_behind(*, within: float = 2.0) -> list[int]:
    """Processes of programs of this process that still run, or whose parents have gone.

    Args:
        within: Seconds in which a killed one may give its memory back, which takes the kernel a
            moment after the program's end is known.
    """
    last = time.monotonic() + within
    while (found := _still_there()) and time.monotonic() < last:
        time.sleep(0.02)
    return found


def _still_there() -> list[int]:
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.pid in mine or process.info["ppid"] == 1:
            command = " ".join(process.info["cmdline"] or ())
            if "/tmp/program.py" in command or "/jail.py" in command:
                found.append(process.pid)
    return found


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Counts of what became of all programs, in a random order, until the time is over."""
    attacks = list(product(PROGRAMS, ways()))
    random.Random(seed).shuffle(attacks)
    counts: dict[str, Any] = {
        "programs": 0,
        "by bubblewrap": 0,
        "escapes": 0,
        "leftovers": 0,
        "found": [],
    }
    end = time.monotonic() + seconds
    with surroundings() as words:
        for name, way in attacks:
            if time.monotonic() > end:
                break
            counts["programs"] += 1
            with by(way):
                outcome = tried(PROGRAMS[name], words)
            counts["by bubblewrap"] += outcome.bubblewrap
            if outcome.passed:
                counts["escapes"] += 1
                counts["found"].append(f"{name}, {way}")
    time.sleep(0.2)
    counts["leftovers"] = len(left_behind())
    return counts
