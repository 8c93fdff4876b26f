"""Data sets: plain examples, and the requests that they become."""

from .documents_source import DocumentsSource
from .file_source import DATA_SETS, DATA_VARIABLE, SCHEMA, DataSet, FileSource, data_set, find_file, read_examples
from .request import Example, Passage, Request, Task, arrange, make_request
from .source import CHUNKINGS, ORDERS, PRESETS, PROMPTS, Preset, RequestSource, Wording

__all__ = [
    "CHUNKINGS",
    "DATA_SETS",
    "DATA_VARIABLE",
    "ORDERS",
    "PRESETS",
    "PROMPTS",
    "SCHEMA",
    "DataSet",
    "DocumentsSource",
    "Example",
    "FileSource",
    "Passage",
    "Preset",
    "Request",
    "RequestSource",
    "Task",
    "Wording",
    "arrange",
    "data_set",
    "find_file",
    "make_request",
    "read_examples",
]
