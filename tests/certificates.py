"""Certificates of a test's own, made by the openssl of the machine."""

import shutil
import subprocess

import pytest

from megatron_ext.teachers.listener import ServerTls

OPENSSL = shutil.which("openssl")


def make_certificate(folder, names="IP:127.0.0.1"):
    """A self-signed certificate for ``names``; skips the test where there is no openssl."""
    if OPENSSL is None:
        pytest.skip("no openssl to make a certificate with")
    folder.mkdir(exist_ok=True)
    pair = ServerTls(folder / "cert.pem", folder / "key.pem")
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "30", "-subj", "/CN=teacher"]
    command += ["-addext", f"subjectAltName={names}"]
    command += ["-keyout", str(pair.key), "-out", str(pair.certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return pair
