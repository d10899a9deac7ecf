"""Lines that say how far tests in several processes are, in a terminal or a file; not dots."""

import time

import pytest

SECONDS_BETWEEN_LINES = 10.0


def line_of(done, number, seconds, where):
    """How many tests are done, for how long they ran, and how long the others take at that rate."""
    left = seconds / done * (number - done)
    share = 100 * done // number
    return (
        f"{done:5d} of {number} tests, {share:3d} %, {_minutes(seconds)} gone, "
        f"about {_minutes(left)} to go; {where}"
    )


def _minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """The part of pytest that writes them; tests that fail are named at once."""

    def __init__(self, terminal, clock=time.monotonic):
        self._terminal, self._clock = terminal, clock
        self._done, self._start, self._said = 0, None, clock()
        self._number = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report):
        """No letter for a test: pytest would write one for each into one line."""
        category, _, word = yield
        return category, "", word

    @pytest.hookimpl(trylast=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._number = len(ids)
        self._start = self._start or self._clock()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(f"FAILED {report.nodeid} ({report.when})", red=True)
        if report.when != "teardown":
            return
        self._done += 1
        now = self._clock()
        last = self._done == self._number
        if last or now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            where = report.nodeid.split("::")[0]
            self._write(line_of(self._done, self._number, now - self._start, where))

    def _write(self, text, **markup):
        self._terminal.ensure_newline()
        self._terminal.write_line(text, **markup)
        self._terminal.flush()


def wanted(config):
    """Whether tests run in several processes, this is none of them, and nobody asked for names."""
    several = getattr(config.option, "numprocesses", None)
    return bool(several) and not hasattr(config, "workerinput") and config.option.verbose == 0


def register(config):
    """Has such lines written where they are wanted."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and wanted(config):
        config.pluginmanager.register(Progress(terminal), "tf_dsgd-progress")
