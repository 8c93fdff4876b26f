"""A LangChain chat model and retriever: an existing chain gets blending by swapping the two."""

from .chat_model import ChatCacheBlend
from .retriever import CacheBlendRetriever

__all__ = ["CacheBlendRetriever", "ChatCacheBlend"]
