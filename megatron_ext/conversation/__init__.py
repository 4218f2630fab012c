"""Conversations: messages, prompt formats, rendering, and ids with training masks."""

from megatron_ext.conversation.conversation_tokenizer import (
    apply_chat_template,
    assistant_prefix_len,
    tokenize_conversation,
)
from megatron_ext.conversation.encoded_conversation import EncodedConversation, encode_conversation
from megatron_ext.conversation.images import (
    DEFAULT_IMAGE_TOKEN_INDEX,
    IGNORE_INDEX,
    IMAGE_TOKEN,
    ImageTags,
    image_tags,
)
from megatron_ext.conversation.masking.answer_parts import TrainingPolicy
from megatron_ext.conversation.message import (
    Conversation,
    ConversationTokenizer,
    Message,
    check_conversation,
)
from megatron_ext.conversation.prompt_format import (
    PROMPT_FORMAT_REGISTRY,
    PromptConfig,
    PromptFormat,
    fitting_formats,
    prompt_config_of,
)
from megatron_ext.conversation.records import (
    RECORD_SCHEMA_REGISTRY,
    ConversationRecord,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.conversation.rendering.provenance import Provenance, Rendered, Span
from megatron_ext.conversation.rendering.template import render

__all__ = [
    "DEFAULT_IMAGE_TOKEN_INDEX",
    "IGNORE_INDEX",
    "IMAGE_TOKEN",
    "PROMPT_FORMAT_REGISTRY",
    "RECORD_SCHEMA_REGISTRY",
    "Conversation",
    "ConversationRecord",
    "ConversationTokenizer",
    "EncodedConversation",
    "ImageTags",
    "Message",
    "PromptConfig",
    "PromptFormat",
    "Provenance",
    "Rendered",
    "Span",
    "TrainingPolicy",
    "apply_chat_template",
    "assistant_prefix_len",
    "check_conversation",
    "conversation_record",
    "encode_conversation",
    "fitting_formats",
    "image_tags",
    "prompt_config_of",
    "render",
    "sniff_record_schema",
    "tokenize_conversation",
]
