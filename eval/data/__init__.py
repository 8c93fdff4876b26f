"""Data sets: plain examples, and the requests that they become."""

from .case_file import SCHEMA, read_examples
from .data_set import DATA_SETS, DATA_VARIABLE, DataSet, data_set, find_file
from .example import Example, Passage, Task
from .file_source import FileSource
from .preset import PRESETS, Preset
from .request import Request, make_request
from .source import RequestSource
from .wording import Wording
from .world_source import WorldSource

__all__ = [
    "DATA_SETS",
    "DATA_VARIABLE",
    "PRESETS",
    "SCHEMA",
    "DataSet",
    "Example",
    "FileSource",
    "Passage",
    "Preset",
    "Request",
    "RequestSource",
    "Task",
    "Wording",
    "WorldSource",
    "data_set",
    "find_file",
    "make_request",
    "read_examples",
]
