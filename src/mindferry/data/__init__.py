"""Data: from text, or tokens in any of the usual forms, to what mindformers' datasets read.

Importing this loads numpy at most; the heavy libraries come with the first call.
"""

from mindferry.data.blend import compile_megatron_helper, megatron_train_dataset
from mindferry.data.build import DataOptions, build_dataset, build_mindrecord
from mindferry.data.inputs import CORPUS_SUFFIXES, find_sources
from mindferry.data.megatron import MegatronDataset, open_megatron
from mindferry.data.mindrecord import MindRecordInfo, check_mindrecord, inspect_mindrecord
from mindferry.data.order import GPTSampleOrder
from mindferry.data.report import DataReport
from mindferry.data.statistics import TokenStatistics, sample_tokens, token_statistics
from mindferry.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "CORPUS_SUFFIXES",
    "ByteTokenizer",
    "DataOptions",
    "DataReport",
    "GPTSampleOrder",
    "MegatronDataset",
    "MindRecordInfo",
    "TokenStatistics",
    "Tokenizer",
    "build_dataset",
    "build_mindrecord",
    "check_mindrecord",
    "compile_megatron_helper",
    "find_sources",
    "inspect_mindrecord",
    "load_tokenizer",
    "megatron_train_dataset",
    "open_megatron",
    "sample_tokens",
    "token_statistics",
]
