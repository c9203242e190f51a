"""doctor comm on what Ascend machines write: samples made by hand, in MindSpore's own names where it has them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.diagnosis.communication import hccl_log, profiler
from mindferry.errors import MindferryError, UsageError

from ..support import run_cli


def step_trace(*rows: dict[str, float]) -> str:
    """step_trace_time.csv with the header that MindSpore writes; microseconds."""
    from mindspore.profiler.analysis.viewer.ascend_step_trace_time_viewer import AscendStepTraceTimeViewer

    out = io.StringIO()
    writer = csv.DictWriter(out, AscendStepTraceTimeViewer.STEP_TRACE_TIME_HEADERS, restval=0)
    writer.writeheader()
    for number, row in enumerate(rows, start=1):
        writer.writerow({"Step": number, **row})
    return out.getvalue()


def operator(elapsed: float, waiting: float, size: float, large: float = 1.0) -> dict:
    """One collective of communication.json: ms and MB."""
    from mindspore.profiler.analysis.viewer.ascend_communication_viewer import (
        AscendCommunicationViewer as Names,
    )

    transit = elapsed - waiting
    return {
        Names.COMMUNICATION_TIME_INFO: {
            Names.START_TIMESTAMP: 1.0, "Elapse Time(ms)": elapsed, Names.TRANSIT_TIME_MS: transit,
            Names.WAIT_TIME_MS: waiting, Names.SYNCHRONIZATION_TIME_MS: 0.0, "Idle Time(ms)": 0.0,
            Names.WAIT_TIME_RATIO: waiting / elapsed, Names.SYNCHRONIZATION_TIME_RATIO: 0.0,
        },
        Names.COMMUNICATION_BANDWIDTH_INFO: {
            "HCCS": {
                Names.TRANSIT_SIZE_MB: size, Names.TRANSIT_TIME_MS: transit, Names.BANDWIDTH_GB_S: size / transit,
                "Large Packet Ratio": large, Names.SIZE_DISTRIBUTION: {},
            },
        },
    }  # fmt: skip


def profile(root: Path, rank: int, trace: str, operators: dict[str, dict] | None = None) -> None:
    folder = root / f"host_{rank}_ascend_ms" / profiler.FOLDER
    folder.mkdir(parents=True)
    (folder.parent / f"profiler_info_{rank}.json").write_text("{}")
    (folder / "step_trace_time.csv").write_text(trace)
    if operators is not None:
        from mindspore.profiler.analysis.viewer.ascend_communication_viewer import AscendCommunicationViewer

        # MindSpore's own code sorts them into p2p and collective and adds the totals.
        viewer = AscendCommunicationViewer.__new__(AscendCommunicationViewer)
        steps = {"step5": viewer._get_communication_ops_dict(operators)}
        (folder / "communication.json").write_text(json.dumps(steps))


def trace(computing: float, exposed: float, overlapped: float, free: float = 0.0, bubble: float = 0.0) -> str:
    row = {
        "Computing": computing, "Communication(Not Overlapped)": exposed, "Overlapped": overlapped,
        "Communication": exposed + overlapped, "Free": free, "Bubble": bubble,
    }  # fmt: skip
    return step_trace(row, row)


def ids(root: Path) -> list[str]:
    return [finding.id for finding in profiler.judge(profiler.read(root))]


def test_exposed_communication_is_no_overlap(tmp_path: Path) -> None:
    profile(tmp_path, 0, trace(70_000, 25_000, 5_000, free=5_000))
    (found,) = profiler.judge(profiler.read(tmp_path))
    assert (found.id, found.severity) == ("comm.no-overlap", "problem")
    assert found.message.startswith("25% of a step is communication that no computing hides; 17% of all")


def test_hidden_communication_is_fine(tmp_path: Path) -> None:
    profile(
        tmp_path, 0, trace(95_000, 3_000, 40_000, free=2_000), {"hcom_allReduce__1@g": operator(9, 1, 800)}
    )
    assert ids(tmp_path) == []


def test_the_rank_that_waits_least_is_the_slow_one(tmp_path: Path) -> None:
    for rank, (computing, waiting) in enumerate(
        [(70_000, 21.0), (90_000, 1.0), (71_000, 20.0), (70_000, 21.0)]
    ):
        operators = {
            "hcom_allReduce__532@1_0": operator(24, waiting, 300),
            "hcom_send__9_0_1": operator(1, 0.1, 5),
        }
        profile(tmp_path, rank, trace(computing, 0, 24_000), operators)
    profiles = profiler.read(tmp_path)
    assert profiles[1].collectives["allreduce"].calls == 1
    assert profiles[1].collectives["send"].megabytes == 5
    assert profiles[0].collectives["allreduce"].gigabytes_per_second == pytest.approx(300 / 3)
    (found,) = profiler.judge(profiles)
    assert found.id == "comm.slow-rank"
    assert "rank 1 waits least" in found.message
    assert "it computes 90.0 ms a step, the others 70.3 ms" in found.cause


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"computing": 60_000, "exposed": 5_000, "overlapped": 0, "free": 35_000}, ["comm.free"]),
        (
            {"computing": 60_000, "exposed": 40_000, "overlapped": 0, "bubble": 35_000},
            ["comm.no-overlap", "comm.bubble"],
        ),
    ],
)
def test_other_parts(tmp_path: Path, row: dict, expected: list[str]) -> None:
    profile(tmp_path, 0, trace(**row))
    assert ids(tmp_path) == expected


def test_small_packets(tmp_path: Path) -> None:
    operators = {f"hcom_allReduce__{n}@g": operator(1.0, 0.1, 2, large=0.3) for n in range(100)}
    profile(tmp_path, 0, trace(95_000, 1_000, 40_000), operators)
    (found,) = profiler.judge(profiler.read(tmp_path))
    assert found.id == "comm.small-buckets"
    assert found.message == "allreduce: 30% of 200 MB in 100 calls goes in large packets"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("step_trace_time.csv", "Step,Computing\n1,2\n", r"no column 'Communication\(Not Overlapped\)'"),
        ("step_trace_time.csv", "", "no column 'Computing', or no steps"),
        ("communication.json", "{", "not what MindSpore's profiler writes"),
        ("communication.json", '{"step": {"collective": {"hcom_allReduce": {}}}}', "not what MindSpore's"),
        ("communication.json", "[]", "not what MindSpore's"),
        ("communication.json", '{"step": 7}', "not what MindSpore's"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    profile(tmp_path, 0, trace(1, 1, 1), {})
    next(tmp_path.rglob(profiler.FOLDER)).joinpath(name).write_text(text)
    with pytest.raises(MindferryError, match=message):
        profiler.read(tmp_path)


def test_nothing_to_read_says_how_to_turn_it_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no ASCEND_PROFILER_OUTPUT") as caught:
        profiler.read(tmp_path)
    assert "profile_communication: True" in caught.value.remedy
    (tmp_path / "plog-1.log").write_text("[INFO] nothing\n")
    with pytest.raises(UsageError, match="no line of a collective") as caught:
        hccl_log.read(tmp_path)
    assert "HCCL_ENTRY_LOG_ENABLE=1" in caught.value.remedy


def entry(
    pid: int,
    count: int,
    op: str = "AllReduce",
    tag: str = "AllReduce_10.0.0.1%eth0_60000_0_17",
    suffix: str = "",
) -> str:
    """A line as CANN's guide on HCCL shows it."""
    return (
        f"[INFO] HCCL({pid},python):2026-03-07-11:43:32.305.623 [hccl_opbase_atrace_info.cc:56][301]"
        f"Entry-Hccl{op}{suffix}: tag[{tag}], sendBuf[0x12], recvBuf[0x34], count[{count}], dataType[float32], "
        "op[sum], localRank[0], streamId[7],comm[0xff], deviceLogicId[0]\n"
        f"[INFO] HCCL({pid},python):2026-03-07-11:43:32.305.700 [a.cc:56][301]Hccl{op}{suffix}:"
        f"success,take time: 42 us,tag[{tag}]\n"
    )


def plog(root: Path, pid: int, text: str, host: str = "host-a") -> None:
    folder = root / host / "run/plog"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"plog-{pid}_20260307.log").write_text(text)


def test_calls_are_counted_by_process_and_communicator(tmp_path: Path) -> None:
    plog(tmp_path, 7, entry(7, 1 << 20) * 3 + entry(7, 5, "AllGather", "tag_b", "Inner"))
    plog(tmp_path, 7, entry(7, 1 << 20) * 3, host="host-b")
    first, second = hccl_log.read(tmp_path)
    assert (first.count, second.count) == (4, 3)
    assert sorted(len(calls) for calls in first.calls.values()) == [1, 3]
    assert first.calls["tag_b"] == [hccl_log.Call("AllGather", 5, "float32")]
    assert first.host_us == {"AllReduce": 126, "AllGather": 42}
    assert hccl_log.judge([first, second]) == []


def test_a_process_that_calls_another_size_is_named(tmp_path: Path) -> None:
    for pid in (1, 2, 3):
        plog(tmp_path, pid, entry(pid, 1000) + entry(pid, 2000 if pid != 2 else 1999) + entry(pid, 3000))
    (found,) = hccl_log.judge(hccl_log.read(tmp_path))
    assert found.id == "comm.mismatch"
    assert (
        "call 2: host-a/run/plog: process 2 calls AllReduce of 1999 float32, others AllReduce of 2000"
        in found.message
    )


def test_a_process_that_stops_calling_is_named(tmp_path: Path) -> None:
    for pid in (1, 2, 3):
        plog(tmp_path, pid, entry(pid, 1000) * (2 if pid == 3 else 5))
    (found,) = hccl_log.judge(hccl_log.read(tmp_path))
    assert found.id == "comm.missing-call"
    assert "call 3: host-a/run/plog: process 3 calls nothing" in found.message


def test_many_small_messages(tmp_path: Path) -> None:
    plog(tmp_path, 1, entry(1, 1000) * 60)
    (found,) = hccl_log.judge(hccl_log.read(tmp_path))
    assert found.message == "60 of 60 collectives carry less than 1 MiB"


@settings(deadline=None)
@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_text_is_survived(lines: list[str]) -> None:
    found: dict = {}
    for line in lines:
        hccl_log._line("HCCL(1,x) Entry-HcclAllReduce: " + line, "x.log", found)
        hccl_log._line(line, "x.log", found)


def test_the_command(tmp_path: Path) -> None:
    profile(tmp_path / "p", 0, trace(70_000, 25_000, 5_000), {"hcom_allReduce__1@g": operator(30, 1, 800)})
    plog(tmp_path / "l", 1, entry(1, 1000) + entry(1, 2000))
    plog(tmp_path / "l", 2, entry(2, 1000))
    done = run_cli("doctor", "comm", "--profile", tmp_path / "p", "--plog", tmp_path / "l", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert [item["id"] for item in answer["findings"]] == ["comm.no-overlap", "comm.missing-call"]
    assert answer["profiles"][0]["collectives"]["allreduce"]["calls"] == 1
    assert answer["culprit"] == "comm.no-overlap"
