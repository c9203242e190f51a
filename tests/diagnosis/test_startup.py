"""Real logs of real failures: the right cause is named; and whatever else comes in is survived."""

from __future__ import annotations

import gzip
import io
import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.diagnosis.startup import diagnose, diagnose_exception, read
from mindferry.diagnosis.startup.knowledge import _HOLE, entries
from mindferry.errors import UsageError

LOGS = Path(__file__).parent / "logs"

# Every log here was printed by MindSpore 2.9.0 and mindformers 1.9.0 (see produce/__main__.py).
EXPECTED = {
    "activation_name.log": "config.activation-name",
    "ascend_on_cpu.log": "env.no-ascend",
    "ascend_set_device.log": "env.no-ascend",
    "ascend_yaml.log": "env.no-ascend",
    "batch_of_unequal_rows.log": "data.unequal-rows",
    "batch_too_large.log": "data.too-small",
    "bfloat16_matmul.log": "operator.bfloat16",
    "bfloat16_matmul_ext.log": "operator.unsupported",
    "call_depth.log": "graph.call-depth",
    "checkpoint_not_one.log": "checkpoint.damaged",
    "construct_without_self.log": "graph.self",
    "dataset_dir_empty.log": "data.file-missing",
    "disk_full.log": "env.disk-full",
    "dtype_string.log": "config.dtype-name",
    "duplicate_parameter.log": "graph.duplicate-parameter",
    "embedding_ids_outside.log": "shape.embedding-range",
    "exec_source.log": "graph.no-source",
    "few_descriptors.log": "env.file-descriptors",
    "flash_attention_cpu.log": "operator.flash-attention",
    "float16_double_matmul.log": "operator.dtype-pair",
    "fused_norm_cpu.log": "mindformers.layout",
    "gpu_on_cpu.log": "env.no-gpu",
    "heads_not_divisible.log": "parallel.heads",
    "int_dropout.log": "config.dropout-int",
    "killed": "env.killed",
    "learning_rate_text.log": "config.learning-rate-text",
    "long_record.log": "shape.sequence-length",
    "map_function_raises.log": "data.map-function",
    "matmul_shapes.log": "shape.matmul",
    "megatron_not_index.log": "data.megatron-index",
    "memory_limit.log": "env.out-of-memory-host",
    "missing_checkpoint.log": "checkpoint.not-there",
    "missing_dataset.log": "data.file-missing",
    "missing_index_file.log": "data.index-missing",
    "morph_pynative.log": "graph.morph",
    "msrun_other_python": "env.other-python",
    "no_compiler.log": "env.no-compiler",
    "no_decorator.log": "env.decorator",
    "no_mindspore.log": "env.other-python",
    "normalization_name.log": "config.normalization-name",
    "numpy_two.log": "env.numpy-2",
    "one_rank_fails": "unknown",
    "one_rank_shape": "shape.matmul",
    "parallel_product": "parallel.product",
    "port_in_use": "launch.port",
    "position_ids_missing.log": "config.eod-position-ids",
    "python_library_in_graph.log": "graph.external-type",
    "reduce_scatter": "operator.collective-cpu",
    "safetensors_cut.log": "checkpoint.damaged",
    "scale_sense_negative.log": "config.clip-norm",
    "semi_auto_cpu.log": "parallel.semi-auto-cpu",
    "send_receive": "operator.collective-cpu",
    "sequence_parallel_alone.log": "parallel.sequence-parallel",
    "type_join.log": "graph.type-join",
    "unknown_callback.log": "config.unregistered-class",
    "unknown_optimizer_argument.log": "config.constructor-argument",
    "unknown_section_key.log": "config.unknown-section-key",
    "unregistered_class.log": "config.unregistered-class",
    "unwritable_output.log": "env.permission",
    "use_parallel_alone.log": "launch.not-msrun",
    "vocabulary_too_small.log": "shape.embedding-range",
    "warmup_float.log": "config.warmup-type",
    "wrong_checkpoint_format.log": "checkpoint.format",
    "wrong_column.log": "data.column",
    "wrong_shape.log": "checkpoint.shape",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_real_log_gets_its_name(name: str) -> None:
    first = diagnose(LOGS / name)[0]
    assert first.id == f"startup.{EXPECTED[name]}"
    assert first.severity == "problem"
    assert first.evidence
    assert first.remedy
    assert not _HOLE.search(first.message + first.remedy)


def test_every_produced_log_is_expected_here() -> None:
    assert {path.name for path in LOGS.iterdir()} == {*EXPECTED, "healthy.log"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("construct_without_self.log", ["self", "construct"]),
        ("wrong_column.log", ["input_ids", "input_columns"]),
        ("vocabulary_too_small.log", ["63", "50", "tokenizer"]),
        ("long_record.log", ["129", "128", "seq_length"]),
        ("wrong_shape.log", ["(8, 4)", "(6, 4)", "weight"]),
        ("int_dropout.log", ["hidden_dropout", "0.0"]),
        ("unknown_section_key.log", ["batchsize", "runner_config"]),
        ("heads_not_divisible.log", ["25", "2"]),
        ("map_function_raises.log", ["expected 16 tokens, got 15"]),
    ],
)
def test_the_logs_own_words_are_used(name: str, words: list[str]) -> None:
    first = diagnose(LOGS / name)[0]
    said = " ".join((first.message, first.cause, first.remedy, first.evidence))
    assert [word for word in words if word not in said] == []


def test_healthy_log_is_no_failure() -> None:
    (only,) = diagnose(LOGS / "healthy.log")
    assert (only.id, only.severity) == ("startup.trained", "info")


def test_root_is_the_first_failing_rank_not_the_scheduler() -> None:
    picture = read(LOGS / "one_rank_fails")
    assert picture.root is not None
    assert (picture.root.rank, picture.root.source) == (1, "worker_1.log")
    assert picture.root.event.headline == "ValueError: records of this rank hold 15 tokens, expected 16"
    followed = {item.known.entry.id for item in picture.consequences if item.known}
    assert followed == {"followed.node-timeout", "followed.job-exit"}


def test_only_the_schedulers_log_says_so() -> None:
    first = diagnose(LOGS / "one_rank_fails" / "scheduler.log")[0]
    assert first.id == "startup.followed.node-timeout"
    assert "worker_N.log" in first.remedy


def test_first_in_time_wins_over_file_order(tmp_path: Path) -> None:
    def log(second: int, text: str) -> str:
        stamp = f"2026-03-01 10:00:{second:02d},000 - mindformers/output/log[mindformers/x.py:1] - ERROR - start\n"
        return stamp + f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\n{text}\n'

    (tmp_path / "worker_0.log").write_text(
        log(30, "RuntimeError: EI0002: The wait execution of the Notify register times out")
    )
    (tmp_path / "worker_1.log").write_text(log(20, "KeyError: 'late'"))
    (tmp_path / "worker_2.log").write_text(log(9, "ZeroDivisionError: division by zero"))
    picture = read(tmp_path)
    assert picture.root is not None
    assert picture.root.rank == 2
    assert [item.rank for item in picture.others] == [1]
    assert [item.rank for item in picture.consequences] == [0]


def test_joined_log_is_taken_apart_by_rank() -> None:
    lines = [
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: mindspore Traceback (most recent call last):",
        '[rank1]:   File "a.py", line 4, in step',
        '[rank0]:   File "b.py", line 9, in wait',
        "[rank1]:     raise ValueError",
        "[rank0]: ConnectionResetError: [Errno 104] Connection reset by peer",
        "[rank1]: ValueError: bad record 17",
    ]
    picture = read(lines)
    assert picture.root is not None
    assert (picture.root.rank, picture.root.event.headline) == (1, "ValueError: bad record 17")


def test_a_caught_exception_is_not_the_root() -> None:
    caught = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "ValueError: tried and caught",
    ]
    going_on = (
        "2026-03-01 10:00:00,000 - mindformers/output/log[mindformers/x.py:1] - INFO - "
        "{ Epoch:[  1/  3], step:[    2/   32], loss: 4.160, per_step_time: 21ms }"
    )
    end = [
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in g',
        "OSError: [Errno 28] No space left on device",
    ]
    assert diagnose([*caught, going_on, *end])[0].id == "startup.env.disk-full"
    assert diagnose([*caught, going_on])[0].id == "startup.unknown"  # the last that is known of it
    assert [item.id for item in diagnose([*caught, *[going_on] * 9])] == ["startup.trained"]


# -- the knowledge base ---------------------------------------------------------------------------------------
def test_knowledge_base_is_complete() -> None:
    known = entries()
    assert len(known) >= 40
    assert len({entry.id for entry in known}) == len(known)
    for entry in known:
        assert entry.cause, entry.id
        assert entry.remedy, entry.id
        assert entry.follows, entry.id
        groups = set.intersection(*({*pattern.groupindex} for pattern in entry.patterns))
        optional = {hole for hole in _HOLE.findall(entry.title) if hole not in groups and hole != "headline"}
        assert not optional or entry.plain, f"{entry.id}: title uses {optional} that not every pattern states"
        assert not _HOLE.search(entry.plain), entry.id
        assert not _HOLE.search(entry.cause), entry.id


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_every_entry_knows_its_sample(entry) -> None:
    if isinstance(entry.sample, dict):
        found = diagnose(
            LOGS
            / (entry.sample["log"] if (LOGS / entry.sample["log"]).is_dir() else f"{entry.sample['log']}.log")
        )
    else:
        found = diagnose(entry.sample.splitlines())
    roots = [item.id for item in found if item.id.startswith("startup.") and item.id != "startup.foreign"]
    assert roots[0] == f"startup.{entry.id}"


def test_no_pattern_takes_long_on_hostile_text() -> None:
    hostile = [
        "a" * 16_000,
        "For '" * 3_000,
        "shape = [1, 2, 3] " * 800,
        "broadcast" + "shape = [" * 1500,
        "Unsupported op [X] on CPU" * 600,
        " " * 16_000,
    ]
    for text in hostile:
        for entry in entries():
            for pattern in entry.patterns:
                start = time.process_time()
                pattern.search(text)
                assert time.process_time() - start < 0.5, (entry.id, pattern.pattern, text[:20])


# -- cases reported in public ---------------------------------------------------------------------------------
def test_case_28_missing_mindspore_module_is_a_version_fault() -> None:
    first = diagnose(
        [
            "Traceback (most recent call last):",
            '  File "a.py", line 1, in <module>',
            "ModuleNotFoundError: No module named 'mindspore.communication_x'",
        ]
    )[0]
    assert first.id == "startup.env.pair.import"
    assert "pair" in first.cause


@pytest.mark.parametrize(
    "line",
    ["RuntimeError: Address already in use", "bind failed, errno: 98", "OSError: [Errno 98] 地址已在使用"],
)
def test_case_29_port(line: str) -> None:
    assert diagnose([line])[0].id == "startup.launch.port"


def test_case_30_plain_sockets_are_said() -> None:
    found = diagnose(["node0:512:512 [0] NCCL INFO Using network Socket", "mindspore step 1"])
    assert found[0].id == "startup.comm.plain-sockets"


def test_case_42_names_the_version_pair() -> None:
    log = [
        "mindspore 2.7.0, mindformers 1.6.0",
        "Traceback (most recent call last):",
        '  File "/venv/site-packages/mindformers/core/parallel_config.py", line 60, in build_parallel_config',
        "TypeError: TransformerOpParallelConfig.__init__() got an unexpected keyword argument 'optimizer_shard'",
    ]
    first = diagnose(log)[0]
    assert first.id == "startup.env.pair.optimizer-shard"
    assert "mindspore 2.7.0" in first.cause
    assert "mindformers 1.6.0" in first.cause
    assert "doctor env" in first.remedy


def test_case_43_numpy_two() -> None:
    first = diagnose(LOGS / "numpy_two.log")[0]
    assert first.id == "startup.env.numpy-2"
    assert "2.2.6" in first.message
    assert "numpy<2" in first.remedy


# -- languages, formats, sizes --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run.sh: 行 3: 4021 已杀死 python train.py", "env.killed"),
        ("run.sh：行 7： 99 段错误 (核心已转储) python train.py", "env.crash"),
        ("写入失败: 设备上没有空间", "env.disk-full"),
        ("bash: /data/out: 权限不够", "env.permission"),
        ("打开的文件过多", "env.file-descriptors"),
        ("fork: 无法分配内存", "env.out-of-memory-host"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
def test_chinese_messages(line: str, expected: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(f"mindspore\n{line}\n".encode(encoding))
    assert diagnose(tmp_path / "a.log")[0].id == f"startup.{expected}"


@pytest.mark.parametrize("form", ["gz", "utf-16", "crlf", "nul", "colours", "cut gz"])
def test_forms_of_one_log(form: str, tmp_path: Path) -> None:
    raw = (LOGS / "int_dropout.log").read_bytes()
    data = {
        "gz": gzip.compress(raw),
        "cut gz": gzip.compress(raw + b"tail\n" * 200_000)[:-40],
        "utf-16": raw.decode().encode("utf-16"),
        "crlf": raw.replace(b"\n", b"\r\n"),
        "nul": b"\0" * 40 + raw,
        "colours": raw.replace(b"ValueError", b"\x1b[31mValueError\x1b[0m"),
    }[form]
    path = tmp_path / ("a.log.gz" if "gz" in form else "a.log")
    path.write_bytes(data)
    assert diagnose(path)[0].id == "startup.config.dropout-int"


def test_a_caught_exception_is_named_without_a_log() -> None:
    try:
        try:
            raise KeyError("The config 'runner_config' gets an unexpected key: batchsize")
        except KeyError as err:
            raise RuntimeError("building failed") from err
    except RuntimeError as err:
        first = diagnose_exception(err)[0]
    assert first.id == "startup.config.unknown-section-key"
    assert "batchsize" in first.message


def test_stdin_and_strings() -> None:
    raw = (LOGS / "int_dropout.log").read_bytes()
    assert diagnose(raw.decode().splitlines())[0].id == "startup.config.dropout-int"
    assert read(io.BytesIO(raw)).root is not None


@pytest.mark.parametrize(
    ("make", "id"),
    [
        (lambda path: path.write_bytes(os.urandom(20_000)), "startup.binary"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + os.urandom(500)), "startup.unreadable"),
        (lambda path: path.mkdir(), "startup.no-log"),
        (lambda path: None, "error"),
        (lambda path: os.mkfifo(path), "error"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(make, id: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(UsageError) as caught:
        diagnose(tmp_path / "x")
    assert caught.value.id == id
    assert "\n" not in caught.value.message


def test_empty_log_invents_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"")
    assert [item.id for item in diagnose(tmp_path / "a.log")] == ["startup.none"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    secret = tmp_path / "secret.log"
    secret.write_text("ValueError: secret\n")
    (tmp_path / "logs/worker_0.log").symlink_to(secret)
    (tmp_path / "logs/deeper").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="no log in this directory"):
        diagnose(tmp_path / "logs")


def test_one_unreadable_log_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "worker_0.log").write_bytes(os.urandom(9_000))
    (tmp_path / "worker_1.log").write_bytes((LOGS / "int_dropout.log").read_bytes())
    ids = [item.id for item in diagnose(tmp_path)]
    assert ids == ["startup.config.dropout-int", "startup.unread"]


def test_foreign_log_is_said() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl',
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    ]
    found = diagnose(lines)
    assert [item.id for item in found] == ["startup.foreign", "startup.unknown"]
    assert "PyTorch" in found[0].message
    assert "mat1 and mat2" in found[1].message
    port = [
        "torch.distributed: RuntimeError",
        "RuntimeError: The server socket has failed to listen (errno: 98 - Address already in use).",
    ]
    assert [item.id for item in diagnose(port)][:2] == ["startup.foreign", "startup.launch.port"]


def test_unknown_error_is_shown_short_and_not_explained() -> None:
    frames = [
        line for n in range(40) for line in (f'  File "/x/deep{n}.py", line {n}, in f{n}', f"    call{n}()")
    ]
    found = diagnose(
        ["Traceback (most recent call last):", *frames, "mindspore.FooError: what nobody has seen"]
    )
    (only,) = found
    assert only.id == "startup.unknown"
    assert only.evidence.splitlines()[-1] == "mindspore.FooError: what nobody has seen"
    assert "deep39.py:39 in f39" in only.evidence
    assert len(only.evidence.splitlines()) <= 6


def test_control_characters_of_a_log_never_reach_the_terminal() -> None:
    (only,) = diagnose(
        [
            "Traceback (most recent call last):",
            '  File "\x1b]0;x\x07.py", line 1, in f',
            "ValueError: \x1b[2J\u202eevil",
        ]
    )
    for text in (only.message, only.evidence, only.remedy):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_long_log_in_bounded_memory() -> None:
    def lines():
        yield b"mindspore"
        for number in range(30_000):
            yield b"[WARNING] ME(1,main):2026-03-01-10:00:00.000.000 [mindspore/x.cc:1] f] step %d" % number
            if number % 10 == 0:
                yield (
                    b"[ERROR] ME(1,main):2026-03-01-10:00:00.000.000 [mindspore/x.cc:1] f] retry %d" % number
                )
        yield b"Traceback (most recent call last):"
        yield b'  File "a.py", line 1, in f'
        yield b"ValueError: " + b"x" * (30 << 20)

    tracemalloc.start()
    picture = read(lines())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert picture.root is not None
    assert picture.root.event.kind == "traceback"
    assert picture.lines > 32_000
    assert peak < 130 << 20  # the one 30 MB line (made here, cut there) is most of it


def test_gigantic_line_is_cut_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.log.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(b"x" * (1 << 20))
        out.write(b"\nValueError: hidden_dropout should be a float within [0, 1), but get 0.\n")
    tracemalloc.start()
    found = diagnose(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[0].id == "startup.config.dropout-int"
    assert peak < 12 << 20


@settings(max_examples=150, deadline=2000)
@given(st.lists(st.binary(max_size=200), max_size=30))
def test_any_bytes_are_survived(lines: list[bytes]) -> None:
    assert diagnose(lines)


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    x = 1",
        "ValueError: no",
        "",
        "During handling of the above exception, another exception occurred:",
        "[ERROR] ME(1:2,Main):2026-03-01-10:00:00.000.000 [mindspore/x.py:1] bad",
        "2026-03-01 10:00:00,000 - mindformers/log[mindformers/x.py:1] - INFO - going on",
        "[rank1]: Traceback (most recent call last):",
        "[rank1]: KeyError: 'a'",
        "- Kernel select failed:",
        "----------------------------------------------------",
        "Python Call Stack",
        "{ Epoch:[  1/  3], loss: 4.1, per_step_time: 3ms }",
    ]
)


@settings(max_examples=200, deadline=2000)
@given(st.lists(PIECES, max_size=40))
def test_any_order_of_log_pieces_is_survived(lines: list[str]) -> None:
    found = diagnose(lines)
    assert found
    json.dumps([vars(item) for item in found])
