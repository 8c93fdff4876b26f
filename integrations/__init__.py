"""CacheBlend inside other people's software, one folder each; nothing below imports from here."""
