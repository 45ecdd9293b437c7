"""Work that was cut off goes on where it was recorded last, byte for byte, and never mixes with another's."""

import multiprocessing
import os
import signal

import pytest
import torch

from turbomill.convert.staged import ResumableDirectory, StagedDirectory
from turbomill.convert.writer import CheckpointWriter
from turbomill.errors import UsageError

RUN = {"model": "abc", "option group": 64}


def tensors(part):
    generator = torch.Generator().manual_seed(part)
    return {f"t{part}.{i}": torch.randn(7, 5 + i, generator=generator).half() for i in range(3)}


def write(dst, parts=range(6), stop=None, identity=RUN, replace=False):
    """Six parts of three tensors; returns the parts done before. `stop` is called with (part, tensor)."""
    staged = ResumableDirectory(dst, identity, replace)
    with CheckpointWriter(dst, {"a": 1}, 300, staged) as writer:
        done = [entry["part"] for entry in staged.entries]
        for part in parts:
            if part in done:
                continue
            for name, tensor in tensors(part).items():
                if stop:
                    stop(part, name)
                writer.add(name, tensor)
            writer.commit({"part": part})
    return done


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def interrupt(part):
    def stop(at, name):
        if (at, name) == (part, f"t{part}.2"):
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("part", range(1, 6))
def test_goes_on_after_an_interruption(tmp_path, part):
    write(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", stop=interrupt(part))
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    assert write(tmp_path / "out") == list(range(part))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert len(files(tmp_path / "out")) > 4 and not (tmp_path / ".out.partial").exists()


def die_at(dst, part, name):
    def stop(at, tensor):
        if (at, tensor) == (part, name):
            os.kill(os.getpid(), signal.SIGKILL)

    write(dst, stop=stop)


def test_goes_on_after_sigkill_with_a_torn_journal_and_stray_bytes(tmp_path):
    write(tmp_path / "whole")
    context = multiprocessing.get_context("spawn")
    for part in (2, 4):
        process = context.Process(target=die_at, args=(tmp_path / "out", part, f"t{part}.1"))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with (tmp_path / ".out.partial" / ResumableDirectory.JOURNAL).open("ab") as journal:
            journal.write(b'{"part": 9, "tens')
        for data in (tmp_path / ".out.partial").glob("*.data"):
            with data.open("ab") as file:
                file.write(b"half a tensor")
    assert write(tmp_path / "out") == [0, 1, 2, 3]
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_killed_while_the_shards_are_finished(tmp_path, monkeypatch):
    write(tmp_path / "whole")
    finish, calls = CheckpointWriter._finish_shard, []

    def stop(self, index, file):
        calls.append(index)
        if index == 2:
            raise KeyboardInterrupt
        finish(self, index, file)

    monkeypatch.setattr(CheckpointWriter, "_finish_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    monkeypatch.undo()
    assert calls == [0, 1, 2] and write(tmp_path / "out") == list(range(6))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_another_runs_work_is_refused_by_name(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", stop=interrupt(3))
    other = {"model": "abc", "option group": 128}
    words = r"\.out\.partial: holds an unfinished run with another option group \(64 there, 128 here\)"
    with pytest.raises(UsageError, match=words):
        write(tmp_path / "out", identity=other)
    with pytest.raises(UsageError, match="option group"):
        ResumableDirectory.check(tmp_path / "out", {"option group": 128})
    assert ResumableDirectory.check(tmp_path / "out", {"model": "abc"})
    assert write(tmp_path / "out", identity=other, replace=True) == []
    assert not ResumableDirectory.check(tmp_path / "out", other)


def test_a_failure_of_the_work_leaves_nothing(tmp_path):
    def fail(part, _name):
        if part == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write(tmp_path / "out", stop=fail)
    assert list(tmp_path.iterdir()) == []

    def full(part, _name):
        if part == 3:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write(tmp_path / "out", stop=full)
    assert write(tmp_path / "out") == [0, 1, 2]


def test_nothing_recorded_is_nothing_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", stop=interrupt(0))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").mkdir()  # of a killed run that recorded nothing
    (tmp_path / ".out.partial" / "shard-0.data").write_bytes(b"x")
    assert write(tmp_path / "out") == []


def test_two_runs_at_once(tmp_path):
    first, second = (ResumableDirectory(tmp_path / "out", run, True) for run in (RUN, {"model": "other"}))
    with first as temp:
        first.append({"part": 0})
        with pytest.raises(UsageError, match="another run is writing here"), second:
            pass
        assert (temp / ResumableDirectory.JOURNAL).stat().st_size > 0


def test_a_plain_staged_directory_still_starts_anew(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", stop=interrupt(3))
    with StagedDirectory(tmp_path / "out") as temp:
        assert list(temp.iterdir()) == []
