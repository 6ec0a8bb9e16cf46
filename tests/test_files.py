"""Files and machines that misbehave: links, devices, full disks, ranks, changed logs, memory.

Independent side: what the file system holds afterwards, and the one line that the user reads.
"""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runtime
from data import InputError, append_row, examples, get_task, read_rows, run_script, write_rows
from helpers import PHASE_3, ROOT, error_message, read_jsonl, run_main
from model import fingerprint
from transformers import LlamaConfig, LlamaForCausalLM


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
@pytest.mark.parametrize("write", [append_row, lambda path, row: write_rows(path, [row])])
def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch, code, write):
    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as error:
        run_script(lambda: write(path, {"a": 1}), "script")
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

    with pytest.raises(SystemExit, match="script: out of memory.*--micro_batch_size.*--shard"):
        run_script(main, "script")


def test_a_message_holds_no_password_and_nothing_that_a_terminal_obeys():
    def main():
        raise InputError("https://me:secret@host/v1 says \033[2J")

    with pytest.raises(SystemExit, match="script: https://…@host/v1 says  \\[2J$"):
        run_script(main, "script")


def test_another_runtime_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a fault"):
        run_script(lambda: (_ for _ in ()).throw(RuntimeError("a fault")), "script")


@pytest.mark.parametrize("settings", [{"RANK": "1"}, {"WORLD_SIZE": "2"},
                                      {"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "3"}])
def test_ranks_without_torchrun_are_refused(tmp_path, settings):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
    command = [sys.executable, "text2grad.py", "--output_dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=ROOT, env=environment | settings, capture_output=True,
                          text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "are set without torchrun; unset them" in done.stderr


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/r\xffun")
    assert "is not UTF-8" in error_message("text2grad.py", "--output_dir", name)
    assert not list(tmp_path.iterdir())


def test_different_ranks_are_refused(monkeypatch):
    for hashes, is_equal in ((["a", "a"], True), (["a", "b"], False)):
        monkeypatch.setattr("runtime.gather_rows", lambda _, hashes=hashes: hashes)
        if is_equal:
            runtime.check_ranks([])
        else:
            with pytest.raises(InputError, match="ranks have different settings, rows, models"):
                runtime.check_ranks([])


# ── Rows

def test_a_null_response_is_no_response():
    """pandas writes null where a row of a table has no value."""
    row = {"prompt": "p", "response": None, "chosen": [{"content": "stored"}], "rejected": None}
    task = get_task("ultrafeedback")
    assert [example["response"] for example in examples(task, [row])] == ["stored"]
    assert task.all_responses({"prompt": "p", "response": None}) == []
    assert task.all_responses({"prompt": "p", "response": ""}) == [{"response": ""}]


@pytest.mark.parametrize("field", ["critique", "feedback", "test", "test_code"])
@pytest.mark.parametrize("value", [["a"], {"a": 1}, 7, True])
def test_a_field_that_is_no_text_is_one_line(tmp_path, field, value):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", field: value}])
    with pytest.raises(InputError, match=f"line 1: field '{field}' must be a text, not"):
        read_rows(tmp_path / "rows.jsonl")


# ── The logs of a finished run

@pytest.mark.parametrize("name, field", [("metrics.jsonl", "delta"),
                                         ("samples.jsonl", "prompt")])
def test_changed_lines_of_a_log_are_left_out(unbroken, reward, tmp_path, capsys, name, field):
    out = shutil.copytree(unbroken, tmp_path / "run")
    lines = (out / name).read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {field: 3})
    (out / name).write_text("\n".join([*lines, ""]))
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", out)
    output = capsys.readouterr().out
    assert f"{out / name} has changed since the checkpoint after iteration 6" in output
    assert (out / name).read_text() == ""
    for other in {"metrics.jsonl", "samples.jsonl"} - {name}:
        assert (out / other).read_bytes() == (unbroken / other).read_bytes()


# ── What a run says of itself

@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has /proc")
def test_peak_memory_is_what_linux_counts():
    """About: the other figure also counts the process that started this one."""
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    assert runtime.peak_memory() == pytest.approx(int(kilobytes) * 1024 / 1e9, rel=0.5)


def test_each_lap_has_its_own_seconds(monkeypatch):
    times = iter([10.0, 13.0, 14.0])
    monkeypatch.setattr("runtime.time.time", lambda: next(times))
    timer = runtime.Timer()
    timer.lap("rollout")
    timer.lap("update")
    assert timer.seconds == {"seconds_rollout": 3.0, "seconds_update": 1.0}


def test_bases_that_differ_in_the_head_alone_have_other_fingerprints():
    config = LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    before = fingerprint(model)
    model.lm_head.weight.data += 1
    assert fingerprint(model) != before
