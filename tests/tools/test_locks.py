"""Claims about `make_once`: two processes never make one file."""
import threading
import time

from open_clip_mdc.bulk.locks import make_once
from open_clip_mdc.data.files import open_locked


def test_a_lock_that_was_removed_while_it_was_waited_for_counts_no_more(tmp_path):
    """Three processes: one ends and removes its lock, one makes another, and one waited for the first."""
    target, hidden = tmp_path / "0.jsonl", tmp_path / ".0.jsonl.lock"
    first = open_locked(hidden)
    waiting = threading.Thread(target=make_once, args=(target, lambda part: part.write_text("waited"), True))
    waiting.start()
    time.sleep(0.5)
    hidden.unlink()
    with open_locked(hidden):
        first.close()
        time.sleep(0.5)
        assert waiting.is_alive() and not target.exists()
        target.write_text("second")
        hidden.unlink()
    waiting.join(60)
    assert target.read_text() == "second" and list(tmp_path.iterdir()) == [target]
