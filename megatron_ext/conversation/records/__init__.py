"""Records of data files as conversations: detection of their schema, and reading."""

from megatron_ext.conversation.records.schemas import (
    RECORD_SCHEMA_REGISTRY,
    RecordSchema,
    RecordSchemaName,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.conversation.records.turns import ConversationRecord

__all__ = [
    "RECORD_SCHEMA_REGISTRY",
    "ConversationRecord",
    "RecordSchema",
    "RecordSchemaName",
    "conversation_record",
    "sniff_record_schema",
]
