"""The supervisor's words: in order, and held while there is no room for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import StorageError
from mettle.runs.recorder import JournalThread


class Disk:
    """What has been written, and whether there is room for more."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.has_room = True

    def write(self, word: int) -> None:
        if not self.has_room:
            raise StorageError("no space left")
        self.words.append(word)


@given(st.lists(st.sampled_from(["word", "full", "room", "again"]), max_size=30))
def test_nothing_is_lost_nor_out_of_order_whenever_the_disk_is_full(story):
    disk, recorder, num_words = Disk(), JournalThread(), 0
    for part in story:
        if part == "word":
            recorder.put(lambda word=num_words: disk.write(word))
            num_words += 1
        elif part == "again":
            recorder.again()
        else:
            recorder.put(lambda has_room=part == "room": setattr(disk, "has_room", has_room))
    # What changes the disk is itself one of the things put, and so is held like the rest: here nothing is.
    recorder.start()
    recorder.close(60.0)
    assert disk.words == list(range(len(disk.words)))


def test_what_could_not_be_written_is_written_when_there_is_room():
    disk, recorder = Disk(), JournalThread()
    disk.has_room = False
    recorder.put(lambda: disk.write(1))
    recorder.put(lambda: setattr(disk, "has_room", True))  # held: it came later
    recorder.put(lambda: disk.write(2))
    recorder.start()
    recorder.close(60.0)
    assert (disk.words, str(recorder.error)) == ([], "no space left")

    disk.has_room = True
    recorder.again()
    recorder.put(lambda: disk.write(3))
    recorder.start()
    recorder.close(60.0)
    assert disk.words == [1, 2, 3]
    assert str(recorder.error) == "no space left", "the first failure ends the run all the same"
