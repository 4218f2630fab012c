"""A server that cannot be started says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_ext.cli.main import main
from megatron_ext.training.run_folder import config_values
from tests.training.tiny_run import student_run, write_corpus


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "a server needs an address to listen at"),
        (("--address", "here:1", "--tls-cert", "c"), "got --tls-cert alone; expected both or none"),
        (("--address", "here:1", "--teacher", "nobody"), "no such teacher; got nobody"),
        (("--address", "here:1"), "teacher.checkpoint"),
        (("--address", "here:1", "--teacher-placement", "server"), "without serving.address"),
    ],
    ids=["address", "key", "name", "checkpoint", "placement"],
)
def test_what_cannot_be_served_is_said_in_one_line(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config_values(student_run(tmp_path, "run"))))
    with pytest.raises(SystemExit) as ended:
        main(["serve-teacher", "--config", str(file), *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
