"""Files and machines that misbehave: links, devices, full disks, other ranks, memory.

Independent side: what the file system holds afterwards, and the one line that the user reads.
"""

import errno
import os
import socket

import pytest
import runtime
from annotate import annotate
from data import InputError, examples, get_task, run_script, write_rows
from helpers import read_jsonl, toy_config


@pytest.mark.parametrize("depth", [1, 2])
def test_a_link_stays_and_its_target_is_written(tmp_path, depth):
    target = tmp_path / "folder" / "rows.jsonl"
    target.parent.mkdir()
    for number in range(depth):
        (tmp_path / f"link{number}").symlink_to(target if number == 0 else f"link{number - 1}")
    link = tmp_path / f"link{depth - 1}"
    for rows in ([{"a": 1}], [{"a": 2}]):
        write_rows(link, rows)
        assert link.is_symlink() and read_jsonl(target) == rows
    assert [path.name for path in target.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe", "socket"])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, kind):
    """As for /dev/null, which no test touches: with a fault, root would replace it."""
    path = tmp_path / "output"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    mode = os.stat(path).st_mode
    with pytest.raises(InputError, match="is not a regular file; name another"):
        write_rows(path, [{"a": 1}])
    assert os.stat(path).st_mode == mode


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOLCK, errno.EROFS, errno.EACCES])
def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch, code):
    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as error:
        run_script(lambda: write_rows(path, [{"a": 1}]), "script")
    message = str(error.value)
    assert os.strerror(code) in message and path.name in message
    assert "; check the path, your permissions, and the disk's free space" in message
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA out of memory. Tried 2 GiB")])
def test_a_lack_of_memory_is_one_line(error):
    def main():
        raise error

    with pytest.raises(SystemExit, match="out of memory.*--micro_batch_tokens.*--shard"):
        run_script(main, "script")


def test_another_runtime_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a fault"):
        run_script(lambda: (_ for _ in ()).throw(RuntimeError("a fault")), "script")


def test_different_ranks_are_refused(monkeypatch):
    for hashes, is_equal in ((["a", "a"], True), (["a", "b"], False)):
        monkeypatch.setattr("runtime.gather_rows", lambda _, hashes=hashes: hashes)
        if is_equal:
            runtime.check_ranks([])
        else:
            with pytest.raises(InputError, match="ranks have different settings, rows, models"):
                runtime.check_ranks([])


def test_each_lap_has_its_own_seconds(monkeypatch):
    times = iter([10.0, 13.0, 14.0])
    monkeypatch.setattr("runtime.time.time", lambda: next(times))
    timer = runtime.Timer()
    timer.lap("rollout")
    timer.lap("update")
    assert timer == {"seconds_rollout": 3.0, "seconds_update": 1.0}


# ── Rows

def test_a_null_response_is_no_response():
    """pandas writes null where a row of a table has no value."""
    row = {"prompt": "p", "response": None, "chosen": [{"content": "stored"}], "rejected": None}
    task = get_task("ultrafeedback")
    assert [example["response"] for example in examples(task, [row])] == ["stored"]
    assert task.all_responses({"prompt": "p", "response": None}) == []
    assert task.all_responses({"prompt": "p", "response": ""}) == [{"response": ""}]


def test_other_data_do_not_replace_an_output(tmp_path):
    def run(name, posts):
        rows = [{"id": post, "post": post, "facts": {}, "response": f"About {post}."}
                for post in posts]
        write_rows(tmp_path / f"{name}.jsonl", rows)
        config = toy_config(task="slf5k", annotator_function="test_files:critic")
        return annotate(config, tmp_path / f"{name}.jsonl", tmp_path / "feedback.jsonl")

    run("first", ["a", "b"])
    before = (tmp_path / "feedback.jsonl").read_bytes()
    for posts in (["c"], ["a"], ["a", "c"]):
        with pytest.raises(InputError, match="has feedback for [12] responses that are not in"):
            run("second", posts)
        assert (tmp_path / "feedback.jsonl").read_bytes() == before
    run("first", ["a", "b", "c"])                                          # rows were added
    assert len(read_jsonl(tmp_path / "feedback.jsonl")) == 3


def critic(row, response):
    """An annotator that praises the first word."""
    return {"textual_feedback": "Good.", "good_spans": [response.split()[0]], "poor_spans": []}
