"""Instructions between threads and with memory, as Python of the values of all threads."""

from tests.ptx.arithmetic import rule, unknown
from tests.ptx.code import Code, size_of, word_of
from tests.ptx.program import Instruction
from tests.ptx.values import sources

_HINTS = """ca cg cs lu cv wb wt nc volatile relaxed acquire release acq_rel gpu cta weak L1 L2
    evict_first evict_last evict_normal evict_unchanged no_allocate"""


def _space(each: Instruction) -> tuple[str, int]:
    """The memory of an access, and the bytes of its addresses."""
    for name, size in (("shared", 4), ("global", 8)):
        if name in each.name:
            return {"shared": "machine.shared", "global": "machine.tensors"}[name], size
    raise unknown(each)


def _vector(each: Instruction) -> list[str]:
    """The registers that an access is of."""
    given = each.operands[0 if each.name[0] == "ld" else 1]
    names = given.strip("{} ").replace(",", " ").split()
    count = next((int(part[1]) for part in each.name if part in ("v2", "v4", "v8")), 1)
    known = {"shared", "global", "v2", "v4", "v8", *_HINTS.split()}
    if {*each.name[1:-1]} - known or len(names) != count:
        raise unknown(each)
    return names


@rule("ld")
def _load(code: Code, each: Instruction) -> None:
    kind, (_, source) = each.name[-1], each.operands[:2]
    if each.name[1] == "param":
        name = source.strip("[]")
        held = f"b{8 * size_of(code.program.parameters[name])}"
        value = f"machine.parameters[{name!r}].astype(u{size_of(kind)}).view({word_of(kind)})"
        assert size_of(held) >= size_of(kind), str(each)
        return code.give(each.operands[0], value, _bits(kind))
    space, width = _space(each)
    names, size = _vector(each), size_of(kind)
    address = code.address(source, width)
    code.add(f"loaded = {space}.load({address}, {code.mask()}, {size}, {len(names)})")
    for place, name in enumerate(names):
        code.give(name, f"loaded[{place}].view({word_of(kind)})", _bits(kind))


def _bits(kind: str) -> str:
    """The type of a kind's bits, with their sign where they have one."""
    return kind if kind[0] == "s" else f"b{8 * size_of(kind)}"


@rule("st")
def _store(code: Code, each: Instruction) -> None:
    kind = f"b{8 * size_of(each.name[-1])}"
    space, width = _space(each)
    values = ", ".join(code.value(name, kind) for name in _vector(each))
    code.add(f"{space}.store({code.address(each.operands[0], width)}, {code.mask()}, [{values}])")


_UPDATES = {"or": "bitwise_or", "and": "bitwise_and", "xor": "bitwise_xor", "add": "add"}
_UPDATES |= {"min": "minimum", "max": "maximum"}


@rule("atom", "red")
def _update(code: Code, each: Instruction) -> None:
    operation, kind = each.name[-2:]
    if operation not in _UPDATES:
        raise unknown(each)
    *out, place, value = each.operands
    space, width = _space(each)
    given = f"{code.address(place, width)}, {code.mask()}, {code.value(value, kind)}"
    code.add(f"found = {space}.update({given}, {_UPDATES[operation]})")
    if out:
        code.give(out[0], "found", kind)


@rule("cp")
def _copy(code: Code, each: Instruction) -> None:
    if each.name[1] != "async":
        raise unknown(each)
    if each.name[2] == "commit_group":
        return code.add("machine.shared.commit()")
    if each.name[2] in ("wait_group", "wait_all"):
        return code.add(f"machine.shared.arrive({each.operands[0] if each.operands else 0})")
    if each.name[2] not in ("ca", "cg") or each.name[-2:] != ("shared", "global"):
        raise unknown(each)
    target, source, size, *given = each.operands
    read = f", {code.value(given[0], 'u32')}" if given else ""
    address = f"{code.address(target, 4)}, {code.address(source, 8)}"
    code.add(f"machine.copy({address}, {code.mask()}, {int(size, 0)}{read})")


@rule("ldmatrix", "stmatrix")
def _matrices(code: Code, each: Instruction) -> None:
    if each.name[-1] != "b16" or "m8n8" not in each.name or code.masked or each.guard:
        raise unknown(each)
    is_load = each.name[0] == "ldmatrix"
    given, place = each.operands if is_load else reversed(each.operands)
    names = given.strip("{} ").replace(",", " ").split()
    whole = f"machine.shared, {code.address(place, 4)}"
    is_transposed = "trans" in each.name
    if not is_load:
        values = ", ".join(code.value(name, "b32") for name in names)
        return code.add(f"store_matrices({whole}, [{values}], {is_transposed})")
    code.add(f"loaded = matrices({whole}, {len(names)}, {is_transposed})")
    for number, name in enumerate(names):
        code.give(name, f"loaded[{number}]", "b32")


@rule("shfl")
def _shuffle(code: Code, each: Instruction) -> None:
    out, x, lane, clamp, *members = each.operands
    if each.name[1] != "sync" or each.guard or not _is_whole(members):
        raise unknown(each)
    mode, threads = each.name[2], code.program.threads
    if lane.isdigit():
        places = code.constant(sources(mode, int(lane), int(clamp, 0), threads))
    else:
        places = "places"
        given = f"{mode!r}, {code.value(lane, 'u32')}, {clamp}, {threads}"
        code.add(f"places = sources({given})")
    code.add(f"machine.meet({_active(code)})")
    code.give(out, f"{code.value(x, 'b32')}.take({places})", "b32")


@rule("redux")
def _reduce(code: Code, each: Instruction) -> None:
    _, way, operation, *quiet, kind = each.name
    out, x, *members = each.operands
    is_known = way == "sync" and operation in _UPDATES and quiet in ([], ["NaN"])
    if not is_known or each.guard or not _is_whole(members):
        raise unknown(each)
    is_number = kind == "f32" and not quiet
    function = f"f{operation}" if is_number else _UPDATES[operation]
    code.add(f"machine.meet({_active(code)}{_members(code, members)})")
    code.give(out, f"reduced({code.value(x, kind)}, {function})", kind)


def _active(code: Code) -> str:
    return "active" if code.masked else "None"


def _is_whole(members: list[str]) -> bool:
    return members in (["-1"], ["0xffffffff"], ["0xFFFFFFFF"]) or members[0].startswith("%")


def _members(code: Code, members: list[str]) -> str:
    return f", {code.value(members[0], 'u32')}" if members[0].startswith("%") else ""


@rule("bar", "barrier")
def _wait(code: Code, each: Instruction) -> None:
    if each.name[1:] == ("warp", "sync"):
        return code.add(f"machine.meet({_active(code)})")
    if each.guard or each.name[-1] != "sync" or each.operands != ("0",):
        raise unknown(each)
    code.add(f"machine.wait({_active(code)})")
