"""The processes around a program that runs under limits. It imports nothing of this package.

    python -I jail.py hold FOLDER DESCRIPTOR < SETTINGS
    python -I jail.py bubblewrap PATH DISK_BYTES DESCRIPTOR < SETTINGS

``SETTINGS`` is JSON: ``source``, ``memory_bytes``, ``disk_bytes``, ``processes``, ``cpu_seconds``,
``needs_namespaces``.

1. Where the kernel lets it, namespaces of its own for users, processes, network, mounts and
   messages are made. No network device is in there but a loopback that is down.
2. The root of the file system becomes an empty one in memory, in which nothing of the machine is
   but Python's own folders and the system's libraries, for reading alone, four devices and an empty
   ``/proc``. ``/tmp`` is a file system in memory of limited size. Root becomes nobody.
   bubblewrap makes both where it is asked to, and starts this file again in there.
3. The first process in there waits for the program and ends; the kernel then ends all others.
4. The program is a Python of its own, under limits, without the rights that the steps before
   needed, and behind a filter of system calls.

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
import struct
import sys
from typing import Any

_MOUNTS = 0x00020000
_USERS = 0x10000000
_NETWORK = 0x40000000
_NAMESPACES = _MOUNTS | _USERS | 0x08000000 | 0x20000000 | _NETWORK
"""CLONE_NEWNS, NEWUSER, NEWIPC, NEWPID, NEWNET"""
_ALL_NAMESPACES = _NAMESPACES | 0x02000000 | 0x04000000 | 0x80
"""Also NEWCGROUP, NEWUTS, NEWTIME."""

_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
_DETACH = 2
_LOCKED_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""statvfs's bits for nosuid, nodev, noexec, noatime, nodiratime, relatime -> mount's."""

_LIBRARIES = (
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
_DEVICES = ("null", "zero", "random", "urandom")

_BEGIN = """__import__("sys").prefix == {prefix!r} or exit("started without " + {prefix!r})
__import__("os").write({descriptor}, b"begun\\n")
exec(compile(open({program!r}, "rb").read(), {program!r}, "exec"))"""
"""Runs a program and leaves it no name of its own."""

_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_CAPABILITIES = 0x20080522
"""The version of capset's data."""
_NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)


def hold(folder: str, descriptor: str) -> None:
    """Make namespaces and a root, run the program, and exit as it does."""
    limits = _begin()
    report = {"namespaces": False, "own_root": False}
    proc = os.open("/proc", os.O_RDONLY)
    # Root's own rights see through folders that nobody may enter.
    is_root = os.getuid() == 0 and _knows_nobody() and not _LIBC.unshare(_NAMESPACES & ~_USERS)
    report["namespaces"] = is_root or _unshare(_NAMESPACES, proc)
    if report["namespaces"]:
        # Only a child is in the new namespace of processes.
        _wait_for_child()
        report["own_root"] = _change_root(folder, limits["disk_bytes"])
    elif os.getuid() == 0 and not _knows_nobody():
        sys.exit("root cannot become nobody in these namespaces, nor make others")
    if is_root or (os.getuid() == 0 and not report["namespaces"]):
        _become_nobody()
    if is_root:
        # In which the processes of this program alone are counted.
        report["namespaces"] = _unshare(_USERS, proc)
    _run("/tmp" if report["own_root"] else folder, int(descriptor), limits, report)


def bubblewrap(path: str, disk_bytes: str, descriptor: str) -> None:
    """Become a bubblewrap that makes namespaces and a root, and goes on with ``inside``."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    proc = os.open("/proc", os.O_RDONLY)
    os.set_inheritable(proc, True)
    then = [sys.executable, "-I", "/jail.py", "inside", str(proc), descriptor]
    os.execv(path, [path, *_bubblewrap_options(int(disk_bytes)), *then])


def inside(proc: str, descriptor: str) -> None:
    """Run the program in what bubblewrap has made, and exit as it does."""
    limits = _begin()
    os.set_inheritable(int(proc), False)
    # bubblewrap would set up the loopback of a network of its own.
    report = {
        "namespaces": not _LIBC.unshare(_NETWORK),
        "own_root": _limit_files(limits["disk_bytes"]),
    }
    if os.getuid() == 0:
        _become_nobody()
        report["namespaces"] &= _unshare(_USERS, int(proc))
    # Rights that bubblewrap hands on to what is started.
    _LIBC.capset(struct.pack("=Ii", _CAPABILITIES, 0), bytes(24))
    _run("/tmp", int(descriptor), limits, report)


def _begin() -> dict[str, Any]:
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o022)
    limits: dict[str, Any] = json.load(sys.stdin)
    return limits


def _run(home: str, descriptor: int, limits: dict[str, Any], report: dict[str, bool]) -> None:
    """Say what took effect, and become the program in a child, under limits."""
    # After the last change of the user, which forgets it.
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    report = {**report, "filtered": os.uname().machine in _CALLS}
    program = os.path.join(home, "program.py")
    # What is no Unicode is for the program's Python to refuse.
    with open(program, "w", encoding="utf-8", errors="surrogatepass") as stream:
        stream.write(limits["source"])
    os.write(descriptor, json.dumps(report).encode() + b"\n")
    if limits["needs_namespaces"] and not all(report.values()):
        sys.exit(1)
    _wait_for_child()
    _limit(limits, is_alone=report["namespaces"])
    _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(home)
    begin = _BEGIN.format(prefix=sys.prefix, descriptor=descriptor, program=program)
    if report["filtered"]:
        _filter_calls(*_CALLS[os.uname().machine])
    environment = {**os.environ, "HOME": home}
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-c", begin], environment)


def _bubblewrap_options(disk_bytes: int) -> list[str]:
    """Options for the namespaces and the root, up to the program.

    Root stays root in there until it becomes nobody; where it is that of other namespaces, which
    may not be, nobody stands for it.
    """
    paths, links = _needed()
    options = "--die-with-parent --as-pid-1 --unshare-pid --unshare-ipc --unshare-uts"
    words = [*options.split(), "--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    if os.getuid() == 0 and _knows_nobody():
        words += ["--cap-add", "ALL"]
    else:
        # The right to mount, for the number of files in /tmp.
        words += ["--unshare-user", "--cap-add", "CAP_SYS_ADMIN"]
        words += ["--uid", str(os.getuid() or _NOBODY), "--gid", str(os.getgid() or _NOBODY)]
    links = {**links, "/dev/shm": "/tmp"}
    new = [at for at in links if not any(at.startswith(f"{path}/") for path in paths)]
    for place in _folders_above([*paths, *new]):
        words += ["--perms", "0755", "--dir", place]
    for path in paths:
        words += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    words += ["--ro-bind", os.path.abspath(__file__), "/jail.py"]
    for at in new:
        words += ["--symlink", links[at], at]
    return [*words, "--dir", "/proc", "--remount-ro", "/", "--"]


def _folders_above(paths: list[str]) -> list[str]:
    """Folders on the way to paths, an outer one first, but for those that are there already."""
    found = set()
    for path in paths:
        while (path := os.path.dirname(path)) != "/":
            found.add(path)
    return sorted(found - {"/tmp"})


def _limit_files(disk_bytes: int) -> bool:
    """Whether ``/tmp`` has its limits now, and Python's folders are for reading alone."""
    try:
        _attach("tmpfs", "/tmp", "tmpfs", _REMOUNT | _NO_SUID | _NO_DEVICES, _sizes(disk_bytes))
    except OSError as error:
        sys.stderr.write(f"no limit of files: {error}\n")
        return False
    return bool(os.statvfs("/").f_flag & os.ST_RDONLY)


def _sizes(disk_bytes: int) -> str:
    return f"size={disk_bytes},nr_inodes=1000"


def _needed() -> tuple[list[str], dict[str, str]]:
    """Paths that Python needs, an outer folder before what is in it, and links on the way there."""
    links: dict[str, str] = {}
    system = [path for path in _LIBRARIES if os.path.exists(path)]
    # The folders of a distribution hold more than Python.
    own = [p for p in (sys.prefix, sys.base_prefix) if p not in ("/usr", "/usr/local", "/")]
    own += [os.path.join("/usr/local", name) for name in ("lib", "lib64")]
    wanted = [sys.executable, *system, *filter(os.path.exists, own)]
    ends = {_follow(path, links) for path in wanted}
    for closed in list(filter(_is_closed, ends)):
        ends.remove(closed)
        ends |= {_follow(os.path.join(closed, name), links) for name in os.listdir(closed)}
    devices = [f"/dev/{name}" for name in _DEVICES]
    return list(filter(os.path.exists, (*sorted(ends), *devices))), links


def _change_root(folder: str, disk_bytes: int) -> bool:
    """Whether the root is now one that has nothing but what Python needs, and ``/tmp``."""
    paths, links = _needed()
    sizes = f"{_sizes(disk_bytes)},mode=1777"
    try:
        _attach(None, "/", None, _RECURSIVE | _PRIVATE)
        _attach("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=1m")
        # Before Python's folders, which may lie below it.
        os.mkdir(folder + "/tmp")
        _attach("tmpfs", folder + "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, sizes)
        for path in paths:
            place = folder + path
            if not os.path.lexists(place):
                _make_place(path, place)
                _attach(path, place, None, _BIND | _RECURSIVE)
        for link, target in links.items():
            if not os.path.lexists(folder + link):
                os.makedirs(os.path.dirname(folder + link), exist_ok=True)
                os.symlink(target, folder + link)
        for point in _points_below(folder):
            if point == folder + "/tmp":
                continue
            _attach(None, point, None, _REMOUNT | _BIND | _READ_ONLY | _locked_flags(point))
        os.mkdir(folder + "/proc")
        # For semaphores of Python's multiprocessing.
        os.symlink("/tmp", folder + "/dev/shm")
        os.chdir(folder)
        number = _CALLS[os.uname().machine][1]["pivot_root"]
        if _LIBC.syscall(number, b".", b".") or _LIBC.umount2(b".", _DETACH):
            return False
        os.chdir("/")
        own_flags = _NO_SUID | _NO_DEVICES
        _attach(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | own_flags)
    except (OSError, KeyError) as error:
        sys.stderr.write(f"no root of its own: {error}\n")
        return False
    return True


def _make_place(path: str, place: str) -> None:
    """Make the folder or file that ``path`` is bound to."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        with open(place, "x"):
            pass


def _points_below(folder: str) -> list[str]:
    """Mount points below a folder."""
    with open("/proc/self/mounts") as stream:
        # Spaces and the like are octal there.
        points = [
            re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[1])
            for line in stream
        ]
    return [point for point in dict.fromkeys(points) if point.startswith(folder + "/")]


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


def _is_closed(path: str) -> bool:
    return os.path.isdir(path) and not os.stat(path).st_mode & 1


def _attach(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    texts = (text and text.encode() for text in (source, target, kind))
    if _LIBC.mount(*texts, flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _knows_nobody() -> bool:
    """Whether the user nobody exists in the namespace of users."""
    with open("/proc/self/uid_map") as stream:
        spans = [tuple(map(int, line.split())) for line in stream]
    return any(first <= _NOBODY < first + count for first, _, count in spans)


def _become_nobody() -> None:
    """Leave root and all its rights behind."""
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
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


def _unshare(namespaces: int, proc: int) -> bool:
    """Whether there are namespaces of our own now, one of users among them.

    Args:
        proc: Descriptor of ``/proc``, which may be out of sight.
    """
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(namespaces):
        return False
    for file, text in (
        ("setgroups", "deny"),
        # The root of other namespaces is nobody in these, and loses its rights with the program.
        ("uid_map", f"{user or _NOBODY} {user} 1"),
        ("gid_map", f"{group or _NOBODY} {group} 1"),
    ):
        try:
            descriptor = os.open(f"self/{file}", os.O_WRONLY, dir_fd=proc)
            with open(descriptor, "w") as stream:
                stream.write(text)
        except OSError:
            # Some systems give an ordinary user namespaces in which nothing is allowed.
            return False
    return True


def _locked_flags(point: str) -> int:
    try:
        found = os.statvfs(point).f_flag
    except OSError:
        return 0
    return sum(flag for bit, flag in _LOCKED_FLAGS.items() if found & bit)


def _limit(limits: dict[str, Any], *, is_alone: bool) -> None:
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


_REFUSED = """
    ptrace syslog personality pivot_root chroot mount umount2 swapon swapoff reboot acct quotactl
    init_module finit_module delete_module kexec_load kexec_file_load shmget shmat shmctl msgget
    semget mq_open add_key request_key keyctl unshare setns perf_event_open fanotify_init
    name_to_handle_at open_by_handle_at process_vm_readv process_vm_writev kcmp memfd_create
    memfd_secret bpf userfaultfd io_uring_setup io_uring_enter io_uring_register open_tree
    move_mount fsopen fsconfig fsmount fspick pidfd_getfd mount_setattr
"""
_NEWER = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "memfd_secret": 447,
}


def _numbers(text: str) -> dict[str, int]:
    words = text.split()
    return {
        name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)
    } | _NEWER


_CALLS = {
    "x86_64": (
        0xC000003E,
        _numbers(
            "shmget 29 shmat 30 shmctl 31 socket 41 clone 56 semget 64 msgget 68 ptrace 101 "
            "syslog 103 personality 135 pivot_root 155 chroot 161 acct 163 mount 165 umount2 166 "
            "swapon 167 swapoff 168 reboot 169 init_module 175 delete_module 176 quotactl 179 "
            "mq_open 240 kexec_load 246 add_key 248 request_key 249 keyctl 250 unshare 272 "
            "perf_event_open 298 fanotify_init 300 name_to_handle_at 303 open_by_handle_at 304 "
            "setns 308 process_vm_readv 310 process_vm_writev 311 kcmp 312 finit_module 313 "
            "memfd_create 319 kexec_file_load 320 bpf 321 userfaultfd 323"
        ),
    ),
    "aarch64": (
        0xC00000B7,
        _numbers(
            "umount2 39 mount 40 pivot_root 41 chroot 51 quotactl 60 acct 89 personality 92 "
            "unshare 97 kexec_load 104 init_module 105 delete_module 106 syslog 116 ptrace 117 "
            "reboot 142 mq_open 180 msgget 186 semget 190 shmget 194 shmctl 195 shmat 196 "
            "socket 198 add_key 217 request_key 218 keyctl 219 clone 220 swapon 224 swapoff 225 "
            "perf_event_open 241 fanotify_init 262 name_to_handle_at 264 open_by_handle_at 265 "
            "setns 268 process_vm_readv 270 process_vm_writev 271 kcmp 272 finit_module 273 "
            "memfd_create 279 bpf 280 userfaultfd 282 kexec_file_load 294"
        ),
    ),
}
"""By machine: its number in the kernel's audit, and the numbers of its system calls."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_INET, _INET6 = 2, 10


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _filter_calls(audit: int, numbers: dict[str, int]) -> None:
    """Refuse system calls that no task needs, for this process and all that it starts.

    Sockets are of the internet alone, which is down; pairs of sockets are there. ``clone3``, whose
    arguments a filter cannot read, is said to be missing, so that the C library takes ``clone``.
    """
    refuse = (_RETURN, 0, 0, _ERROR | _EPERM)
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # The other set of calls of x86-64.
        (_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
    ]
    for name in _REFUSED.split():
        code += [(_EQUAL, 0, 1, numbers[name]), refuse]
    code += [(_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    # From here on the low half of the first argument: flags of clone, the family of a socket.
    allow = (_RETURN, 0, 0, _ALLOW)
    code += [(_EQUAL, 0, 4, numbers["clone"]), (_LOAD, 0, 0, 16)]
    code += [(_ANY_BIT, 0, 1, _ALL_NAMESPACES), refuse, allow]
    code += [(_EQUAL, 0, 5, numbers["socket"]), (_LOAD, 0, 0, 16)]
    code += [(_EQUAL, 2, 0, _INET), (_EQUAL, 1, 0, _INET6), refuse, allow]
    code += [allow]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = _Program(len(code), ctypes.addressof(packed))
    if _LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        sys.exit(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
