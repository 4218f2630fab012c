"""The processes around a program that runs under limits. It imports nothing of this package.

    python -I jail.py FOLDER DESCRIPTOR < SETTINGS

``SETTINGS`` is JSON: ``source``, ``memory_bytes``, ``disk_bytes``, ``processes``, ``cpu_seconds``,
``needs_namespaces``.

1. Root becomes nobody, who is under every limit; in namespaces that know no nobody, in step 2.
2. Where the kernel lets it, namespaces of its own for users, processes, network, mounts and
   messages are made. No network device is in there but a loopback that is down. Everything that is
   mounted is for reading alone; ``FOLDER`` is a file system in memory of limited size; ``/proc`` is
   empty.
3. The first process in there waits for the program and ends; the kernel then ends all others.
4. The program is a Python of its own, under limits and without the rights that step 2 needed.

What took effect is written to the descriptor as a line of JSON, and a line ``begun`` by the Python
of step 4 before it reads the program. The program may write to it, too. Whatever goes wrong before
``begun`` is the jail's fault, and said on standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys

_MOUNTS = 0x00020000
_NAMESPACES = _MOUNTS | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET"""

_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
_LOCKED_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""statvfs's bits for nosuid, nodev, noexec, noatime, nodiratime, relatime -> mount's."""

_BEGIN = """__import__("sys").prefix == {prefix!r} or exit("started without " + {prefix!r})
__import__("os").write({descriptor}, b"begun\\n")
exec(compile(open({program!r}, "rb").read(), {program!r}, "exec"))"""
"""Runs a program and leaves it no name of its own."""

_PDEATHSIG, _SET_DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(folder: str, descriptor: str) -> None:
    """Run the program; exit as it does."""
    limits = json.load(sys.stdin)
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o022)
    if os.getuid() == 0:
        _let_all_enter([sys.executable, sys.prefix, sys.base_prefix, folder])
        _become_nobody()
    report = {"namespaces": _unshare(), "read_only": False}
    if report["namespaces"]:
        # Only a child is in the new namespace of processes.
        _wait_for_child()
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        report["read_only"] = _mount(folder, limits["disk_bytes"])
    elif os.getuid() == 0:
        sys.exit("root cannot become nobody in these namespaces, nor make others")
    program = os.path.join(folder, "program.py")
    # What is no Unicode is for the program's Python to refuse.
    with open(program, "w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.write(limits["source"])
    os.write(int(descriptor), json.dumps(report).encode() + b"\n")
    if limits["needs_namespaces"] and not all(report.values()):
        sys.exit(1)
    _wait_for_child()
    _limit(limits, is_alone=report["namespaces"])
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(folder)
    begin = _BEGIN.format(prefix=sys.prefix, descriptor=descriptor, program=program)
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-c", begin], dict(os.environ))


def _let_all_enter(paths: list[str]) -> None:
    """Show everybody, to us alone, what lies below folders that only root may enter.

    Such a folder is covered by an empty one that has nothing but these paths, and the links to
    them.
    """
    links: dict[str, str] = {}
    ends = {_follow(path, links) for path in paths}
    for folder in list(filter(_is_closed, ends)):
        ends.remove(folder)
        ends |= {_follow(os.path.join(folder, name), links) for name in os.listdir(folder)}
    if not any(map(_closed_parent, (*links, *ends))) or _LIBC.unshare(_MOUNTS):
        return
    _attach(None, "/", None, _RECURSIVE | _PRIVATE)
    # Held before anything covers them; an outer folder sorts before what is in it.
    held = {path: os.open(path, os.O_PATH) for path in sorted(ends) if os.path.exists(path)}
    for path in (*held, *links):
        while closed := _closed_parent(path):
            _attach("tmpfs", closed, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755")
        if os.path.lexists(path):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if path in links:
            os.symlink(links[path], path)
            continue
        source = f"/proc/self/fd/{held[path]}"
        if os.path.isdir(source):
            os.mkdir(path)
        else:
            os.mknod(path)
        _attach(source, path, None, _BIND | _RECURSIVE)


def _follow(path: str, links: dict[str, str]) -> str:
    """Where a path leads; links on the way are added to what is known, with their targets."""
    here, ahead = "/", path.split("/")[::-1]
    while ahead:
        step = os.path.normpath(os.path.join(here, ahead.pop()))
        if os.path.islink(step):
            links[step] = os.readlink(step)
            ahead += links[step].split("/")[::-1]
            here = "/" if links[step].startswith("/") else here
        else:
            here = step
    return here


def _closed_parent(path: str) -> str | None:
    """The outermost folder around a path that not everybody may enter."""
    parents = [path[:end] for end in range(1, len(path)) if path[end] == "/"]
    return next(filter(_is_closed, parents), None)


def _is_closed(path: str) -> bool:
    return os.path.isdir(path) and not os.stat(path).st_mode & 1


def _attach(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    texts = (text and text.encode() for text in (source, target, kind))
    if _LIBC.mount(*texts, flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _become_nobody() -> None:
    """Leave root behind, unless these namespaces know no nobody."""
    try:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    except OSError:
        return
    # Changing the user has made files of this process under /proc root's.
    _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def _wait_for_child() -> None:
    """Go on in a child, whose end is the end of this process."""
    child = os.fork()
    if child:
        while True:
            # The first process of a namespace inherits orphans; they are waited for, too.
            ended, status = os.wait()
            if ended == child:
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _unshare() -> bool:
    """Whether there are namespaces of our own now."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_NAMESPACES):
        return False
    for file, text in (
        ("setgroups", "deny"),
        # The root of other namespaces is nobody in these, and loses its rights with the program.
        ("uid_map", f"{user or _NOBODY} {user} 1"),
        ("gid_map", f"{group or _NOBODY} {group} 1"),
    ):
        try:
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)
        except OSError:
            # Some systems give an ordinary user namespaces in which nothing is allowed.
            return False
    return True


def _mount(folder: str, disk_bytes: int) -> bool:
    """Whether nothing can be written but a folder in memory."""
    with open("/proc/self/mounts") as stream:
        # Spaces and the like are octal there.
        points = [
            re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[1])
            for line in stream
        ]
    if _LIBC.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None):
        return False
    is_whole = True
    for point in dict.fromkeys(points):
        # Flags that a mount has may not be given up.
        flags = _REMOUNT | _BIND | _READ_ONLY | _locked_flags(point)
        if _LIBC.mount(None, point.encode(), None, flags, None):
            is_whole = is_whole and not os.access(point, os.W_OK)
    flags, options = _NO_SUID | _NO_DEVICES, f"size={disk_bytes},nr_inodes=1000".encode()
    for place in (b"/proc", folder.encode()):
        is_whole = not _LIBC.mount(b"tmpfs", place, b"tmpfs", flags, options) and is_whole
    flags |= _REMOUNT | _BIND | _READ_ONLY
    return not _LIBC.mount(None, b"/proc", None, flags, None) and is_whole


def _locked_flags(point: str) -> int:
    try:
        found = os.statvfs(point).f_flag
    except OSError:
        return 0
    return sum(flag for bit, flag in _LOCKED_FLAGS.items() if found & bit)


def _limit(limits: dict[str, int], *, is_alone: bool) -> None:
    """Limits of the program and what it starts.

    Args:
        is_alone: The kernel counts processes of this namespace; otherwise all of the user.
    """
    others = 0 if is_alone else _threads_of_user()
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _threads_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
