"""Data: from text to what mindformers' datasets read.

Importing this loads numpy at most; the heavy libraries come with the first call.
"""

from mindferry.data.build import build_mindrecord
from mindferry.data.mindrecord import MindRecordInfo, check_mindrecord, inspect_mindrecord
from mindferry.data.report import DataReport
from mindferry.data.text_files import TEXT_SUFFIXES

__all__ = [
    "TEXT_SUFFIXES",
    "DataReport",
    "MindRecordInfo",
    "build_mindrecord",
    "check_mindrecord",
    "inspect_mindrecord",
]
