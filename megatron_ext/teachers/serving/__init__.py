"""A teacher elsewhere: a server around it, and a teacher on the student's ranks that asks it."""

from megatron_ext.teachers.serving.listener import TeacherListener
from megatron_ext.teachers.serving.remote_teacher import RemoteTeacher
from megatron_ext.teachers.serving.replica_ranks import ReplicaRanks
from megatron_ext.teachers.serving.teacher_client import TeacherClient, connect, own_addresses
from megatron_ext.teachers.serving.teacher_server import TeacherServer

__all__ = [
    "RemoteTeacher",
    "ReplicaRanks",
    "TeacherClient",
    "TeacherListener",
    "TeacherServer",
    "connect",
    "own_addresses",
]
