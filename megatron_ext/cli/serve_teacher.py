"""Serve a run's teacher to remote students, until interrupted.

    torchrun --nproc-per-node 4 -m megatron_ext serve-teacher --config run.yaml --address node7:7000

The configuration is the run's, whose teacher has placement: server and serving.address. Its layout
is serving.tensor_model_parallel_size and serving.pipeline_model_parallel_size; further replicas
listen at the following ports. Students may connect and leave at any time. The environment variable
MEGATRON_EXT_TEACHER_KEY, or the file serving.token_file, holds a secret that students must share.
To serve other machines, that and TLS (--tls-cert, --tls-key) are required; students then set
serving.root_certificate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from megatron_ext.cli.output import named_teacher, quiet_libraries
from megatron_ext.errors import ConfigError
from megatron_ext.imports import large_imports
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_from_arguments,
    is_given,
)
from megatron_ext.training.inputs import read_served_teacher
from megatron_ext.training.run_plan import TeacherPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.usage = "%(prog)s --config FILE --address HOST:PORT [options]"
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--teacher",
        metavar="NAME",
        help="name of one of several teachers; the only one when left out",
    )
    serving.add_argument("--address", metavar="HOST:PORT", help="address to listen on")
    serving.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM file of the server's certificate, with the chain behind it",
    )
    serving.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="PEM file of the certificate's private key"
    )
    # Set for a process that a student's rank starts: its end of a socket pair.
    serving.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve the teacher."""
    config = config_from_arguments(arguments)
    name = named_teacher(config, arguments.teacher, what_for="serve")
    if (arguments.address is None) == (arguments.parent_fd is None):
        raise ConfigError("a server needs an address to listen at", fix="pass --address HOST:PORT")
    certificate, key = arguments.tls_cert, arguments.tls_key
    if (certificate is None) != (key is None):
        raise ConfigError(
            "a certificate and its private key go together",
            got="--tls-cert alone" if key is None else "--tls-key alone",
            expected="both or none",
            fix="pass both files",
        )
    from megatron_ext.training.megatron_models.cpu_megatron import on_this_device

    has_precision = is_given(arguments, "training", "precision")
    training = on_this_device(config.training, has_precision=has_precision)
    config = replace(config, training=training)
    teacher = TeacherPlan.of(config, name)
    tokenizer = read_served_teacher(teacher)
    quiet_libraries()
    with large_imports():
        from megatron_ext.training.teachers.serve_teacher import serve_at, serve_parent

    if arguments.parent_fd is not None:
        serve_parent(teacher, tokenizer, arguments.parent_fd)
        return
    from megatron_ext.teachers.listener import ServerTls

    tls = ServerTls(certificate, key) if certificate is not None else None
    try:
        serve_at(teacher, tokenizer, arguments.address, tls=tls)
    except KeyboardInterrupt:
        sys.stdout.write(f"teacher {name} is served no more\n")
