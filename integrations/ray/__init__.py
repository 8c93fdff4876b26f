"""Precompute on Ray: actors that split, embed and compute documents' KV, and the ingest that commits what they deliver."""
