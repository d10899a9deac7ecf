"""`python -m tf_dsgd` and its commands, as a user types them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import tf_dsgd
from tests import helpers
from tests.packaging.repository import run_python
from tf_dsgd.launch import options


def run(*arguments, timeout=60.0, **environment):
    return run_python("-m", "tf_dsgd", *arguments, timeout=timeout, **environment)


def test_the_version_without_importing_tensorflow():
    code = (
        "import runpy, sys; sys.orig_argv[:] = ['python', '-m', 'tf_dsgd', '--version'];"
        "sys.argv[:] = ['-m', '--version']; import tf_dsgd; sys.argv[0] = 'tf_dsgd';"
        "runpy.run_module('tf_dsgd.__main__', run_name='__main__');"
        "print('tensorflow' in sys.modules)"
    )
    ended = run_python("-c", code, timeout=60.0)
    assert ended.stdout.split("\n")[:2] == [f"tf_dsgd {tf_dsgd.__version__}", "False"]


@pytest.mark.parametrize("asked", ["--help", "lanch"])
def test_the_usage_without_importing_tensorflow(asked):
    """Which takes ten seconds, and has lines of its own above what it is asked for."""
    code = (
        f"import sys; sys.orig_argv[:] = ['python', '-m', 'tf_dsgd', {asked!r}];"
        f"sys.argv[:] = ['-m', {asked!r}]; import tf_dsgd;"
        "print('tensorflow' in sys.modules)"
    )
    assert run_python("-c", code, timeout=60.0).stdout == "False\n"


def test_whoever_reads_the_usage_may_stop():
    """As `head -2` does: the rest is for nobody, and no error."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tf_dsgd", "--help"]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=60.0)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_is_here():
    ended = run()
    assert ended.returncode == 0, ended.stderr
    for word in ("TensorFlow  2.", "Keras       3.", "cores", "launch", "selfcheck"):
        assert word in ended.stdout
    assert f"tf_dsgd     {tf_dsgd.__version__}" in ended.stdout


@pytest.mark.parametrize(("given", "meant"), [("lanch", "launch"), ("self-check", "selfcheck")])
def test_a_command_that_there_is_not(given, meant):
    ended = run(given)
    assert ended.returncode == 2
    assert f"Did you mean {meant}?" in ended.stderr


def test_launch_as_a_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; print('SCRIPT', sys.argv[1:])")
    ended = run("launch", "--workers", "1", "--spmd", str(script), "a", "--b")
    assert ended.returncode == 0, ended.stderr
    assert "SCRIPT ['a', '--b']" in ended.stdout


@pytest.mark.slow
def test_the_selfcheck():
    ended = run("selfcheck", timeout=240.0)
    for word in ("TensorFlow  2.", "Keras       3.", "cores", "oneDNN"):
        assert word in ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 5
    assert lines[-1].startswith("all is well")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--worker", "2", "train.py"], "there is no --worker: did you mean --workers?"),
        (["--workers", "2", "--restart-workers", "1", "t.py"], "did you mean --restart_workers?"),
        (["--workers=2", "--threads", "3", "t.py"], "did you mean --threads_per_worker?"),
    ],
)
def test_options_of_the_launcher_that_there_are_not(capsys, arguments, hint):
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_what_belongs_to_the_script_gets_no_hint(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--workers", "2", "no_such_file.py", "--worker", "3"])
    said = capsys.readouterr().err
    assert "no_such_file.py" in said and "did you mean" not in said


def commands_of_children(pid):
    """The launcher has others than its script: one tells whether there is a GPU."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield child.cmdline()


@pytest.mark.alone
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_ctrl_c_as_the_script_starts(tmp_path, seconds):
    """Nobody's traceback, while Python imports its own modules for the script."""
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "tf_dsgd.launch", "--workers", "1", "--spmd", str(script)],
        cwd=helpers.ROOT,
        env=helpers.python_env(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30.0
        while not any(str(script) in command for command in commands_of_children(process.pid)):
            assert time.monotonic() < deadline
        time.sleep(seconds)  # the moment is what is tested
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in said, said


SLOW = """
import time
time.sleep(0.5)  # a script that has just begun is killed instead
print("READY", flush=True)
time.sleep(60)
"""


def interrupted(*arguments, **environment):
    """Ctrl-C when it says so; its exit code and what it wrote to standard error."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=helpers.python_env() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "READY" not in (line := process.stdout.readline()):
            assert line, process.communicate(timeout=10)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.wait(timeout=10)
    return process.returncode, said


@pytest.mark.parametrize(("script", "shown"), [("import slow_module", False), (SLOW, True)])
def test_ctrl_c_within_an_import_of_a_launched_script(tmp_path, script, shown):
    """As in TensorFlow's, which takes seconds; in the script's own lines Python says where."""
    (tmp_path / "slow_module.py").write_text(SLOW)
    (tmp_path / "train.py").write_text(script)
    launch = ("-m", "tf_dsgd.launch", "--spmd", "--workers", "1")
    code, said = interrupted(*launch, tmp_path / "train.py")
    assert code == 130
    assert said.strip().endswith("KeyboardInterrupt") if shown else said == ""


@pytest.mark.parametrize(
    ("script", "traceback"),
    [("import tf_dsgd", False), ("def within():\n    import tf_dsgd\nwithin()", True)],
    ids=["script", "function"],
)
def test_ctrl_c_within_the_import_of_the_package(tmp_path, script, traceback):
    """A script ends without a traceback. Who imports it in a function may want to clean up."""
    (tmp_path / "keras.py").write_text(SLOW)
    (tmp_path / "train.py").write_text(script)
    path = f"{tmp_path}:{helpers.ROOT}"
    code, said = interrupted(tmp_path / "train.py", PYTHONPATH=path)
    assert code == -signal.SIGINT  # which a shell calls 130
    assert ("Traceback" in said) is traceback, said


def test_what_python_runs_before_a_launched_script_leaves_all_as_it_was(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__")
    script = "import os, sys; print(['OWN', theirs, os.environ['PYTHONPATH'], sys.path[1:]])"
    (tmp_path / "train.py").write_text(script)
    path = f"{tmp_path}:{helpers.ROOT}"
    ended = run("launch", "--spmd", "--workers", "1", str(tmp_path / "train.py"), PYTHONPATH=path)
    alone = run_python(str(tmp_path / "train.py"), timeout=60.0, PYTHONPATH=path)
    assert alone.stdout.startswith("['OWN', ")
    assert ended.stdout == alone.stdout, ended.stderr


@pytest.mark.slow
def test_ctrl_c_as_the_launcher_itself_starts():
    """As its modules are imported, and it has no handler yet."""
    code = (
        "import os, signal, sys; sys.orig_argv[:] = ['python', '-m', 'tf_dsgd.launch'];"
        "sys.argv[:] = ['-m']; import tf_dsgd; os.kill(os.getpid(), signal.SIGINT)"
    )
    ended = run_python("-c", code, timeout=60.0)
    assert ended.returncode == -signal.SIGINT  # which a shell calls 130
    assert "Traceback" not in ended.stderr
