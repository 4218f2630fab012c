import resource

import pytest

from megatron_ext.files import append_lines, write_bytes, write_text


def test_a_file_is_replaced_by_what_is_written(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    write_text(path, "first")
    write_text(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()


def test_nothing_else_stays_in_the_folder(tmp_path):
    write_bytes(tmp_path / "file", b"x")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, fill_disk):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    fill_disk()
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_gets_the_permissions_that_any_new_file_gets(tmp_path):
    write_bytes(tmp_path / "ours", b"")
    (tmp_path / "plain").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "log"
    append_lines(path, b"one\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, limits[1]))
    try:
        with pytest.raises(OSError, match="No space"):
            append_lines(path, b"two\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"one\n"
    append_lines(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
