"""A LangChain chat model and retriever.

A chain blends where the retriever's documents reach the chat model as documents, `model.invoke(question, documents=found)`, as
in `examples/langchain_chain.py`. What a prompt template has put into a message's text is text: it is answered, and not blended.
"""

from .chat_model import ChatCacheBlend
from .retriever import CacheBlendRetriever

__all__ = ["CacheBlendRetriever", "ChatCacheBlend"]
