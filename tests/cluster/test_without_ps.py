"""Without ps tasks workers hold the weights: one that is lost takes a part of them along."""

import re
import shlex
import time

from tests.cluster import processes
from tests.cluster.observing import MODULE, SCRIPTS, exit_of, log, measures_no_seconds, report, said


@measures_no_seconds
def test_a_lost_worker_ends_training_and_the_command_in_the_error_resumes(tmp_path):
    """In the middle of an epoch. That each example was used once an epoch is asserted there."""
    options = (*MODULE, "--workers", "3", "--ps", "0")
    script = str(SCRIPTS / "no_ps_resumed.py")
    with processes.started(*options, script, str(tmp_path / "backup")) as process:
        said(process, "KILLS")
        start = time.monotonic()
        said(process, "tf_dsgd: Lost worker 1 at ", 45.0)  # which takes about a second
        code, _ = exit_of(process, 60.0)
        assert time.monotonic() - start < 60.0
    assert code == 1, log(process)
    error = process.text[process.text.rindex("tf_dsgd: Lost worker 1") :]
    assert "Traceback" not in error and len(error.splitlines()) < 20, error
    found = re.search(r"The last checkpoint is in (.*)\. To go on from it: (.*)", error)
    assert found and found[1].startswith(f"{tmp_path}/backup/checkpoint-"), error

    _, *arguments = shlex.split(found[2])
    with processes.started(*arguments) as process:
        # 200 mini-batches an epoch, a checkpoint each 30, and the worker was lost after 250.
        assert report(process, "RESUMED") == 240, log(process)
        assert report(process, "DONE") == 600, log(process)
        assert exit_of(process, 60.0)[0] == 0, log(process)
