"""Chunks of student and teacher tokens that cover the same bytes."""

from megatron_ext.alignment.alignment import Alignment, ChunkClass, ChunkCounts
from megatron_ext.alignment.byte_alignment import align_byte_ends
from megatron_ext.alignment.control_pairs import ControlClasses
from megatron_ext.alignment.conversation_alignment import (
    ConversationAlignment,
    align_conversation,
    align_encoded_conversations,
)
from megatron_ext.alignment.spelling import AlignedTokens, Tokens
from megatron_ext.alignment.text_alignment import BridgedAlignment, TextBridge, bridge_texts
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.alignment.window import Windows, cut_windows, truncate

__all__ = [
    "AlignedTokens",
    "Alignment",
    "BridgedAlignment",
    "ChunkClass",
    "ChunkCounts",
    "ControlClasses",
    "ConversationAlignment",
    "TextBridge",
    "TokenAligner",
    "Tokens",
    "Windows",
    "align_byte_ends",
    "align_conversation",
    "align_encoded_conversations",
    "bridge_texts",
    "cut_windows",
    "truncate",
]
