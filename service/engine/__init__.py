"""The engine: retriever, store, loader and fusor joined into requests, prompts, ingest and documents."""
