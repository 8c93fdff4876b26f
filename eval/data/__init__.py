"""Data sets: plain examples, and the requests that they become."""

from .case_file import SCHEMA, read_examples
from .data_set import DATA_SETS, DATA_VARIABLE, DataSet, data_set, find_file
from .documents_source import DocumentsSource
from .example import Example, Passage, Task
from .file_source import FileSource
from .preset import CHUNKINGS, ORDERS, PRESETS, Preset
from .request import Request, arrange, make_request
from .source import RequestSource
from .wording import PROMPTS, Wording
from .world_source import WorldSource

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
    "WorldSource",
    "arrange",
    "data_set",
    "find_file",
    "make_request",
    "read_examples",
]
