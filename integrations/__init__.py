"""CacheBlend inside other people's software, one folder each; nothing here is imported by the rest of the product."""
