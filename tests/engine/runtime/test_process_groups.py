"""Hard time limits kill the whole group, and children do not outlive their parent."""

import os
import signal
import subprocess
import sys
import textwrap

from auto_research.runtime.process import run_limited


def run_script(source, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)], **options)


def wait_for_end_of(reading):
    """Block until every holder of the pipe's writing end is gone: the kernel closes it with the last process."""
    with os.fdopen(reading, "rb") as handle:
        return handle.read()


STUBBORN = "trap '' TERM; (trap '' TERM; echo child >&{fd}; while :; do sleep 1; done) & echo parent >&{fd}; wait; wait"


def test_time_limit_kills_children_that_ignore_term(tmp_path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    writing = os.open(fifo, os.O_WRONLY)
    finished = run_limited(
        ["sh", "-c", f"exec 3>{fifo}; " + STUBBORN.format(fd=3)], timeout=0.5, log=tmp_path / "log.txt"
    )
    os.close(writing)
    assert finished.timed_out
    assert finished.returncode == -signal.SIGKILL
    assert set(wait_for_end_of(reading).split()) == {b"child", b"parent"}


def test_a_group_that_obeys_term_ends_by_it():
    finished = run_limited(["sleep", "60"], timeout=0.2)
    assert (finished.timed_out, finished.returncode) == (True, -signal.SIGTERM)


def test_output_environment_and_folder(tmp_path):
    log = tmp_path / "logs" / "job.txt"
    for text in ("one", "two"):
        finished = run_limited(
            [sys.executable, "-c", "import os; print(os.environ['WORD'], os.path.basename(os.getcwd())); exit(3)"],
            timeout=60,
            env={"WORD": text},
            cwd=tmp_path,
            log=log,
        )
        assert (finished.returncode, finished.timed_out) == (3, False)
    assert log.read_text() == f"one {tmp_path.name}\ntwo {tmp_path.name}\n"


def test_background_children_end_with_the_command():
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    # close_fds of the command would drop the pipe, so the command runs in a script that passes it on
    script = """
        import sys, subprocess
        from auto_research.runtime import process
        real = subprocess.Popen
        process.subprocess.Popen = lambda *a, **k: real(*a, **{**k, "close_fds": False})
        print(process.run_limited(["sh", "-c", "sleep 600 & exit 0"], timeout=60).returncode)
        """
    outer = run_script(script, pass_fds=[writing], stdout=subprocess.PIPE, text=True)
    os.close(writing)
    assert outer.communicate()[0].strip() == "0"
    assert wait_for_end_of(reading) == b""


def test_the_group_dies_with_a_killed_supervisor(tmp_path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    script = """
        import sys
        from auto_research.runtime.process import run_limited
        run_limited(["sh", "-c", "exec 3>" + sys.argv[1] + "; echo up >&3; sleep 600"], timeout=None)
        """
    supervisor = run_script(script, fifo)
    with open(fifo, "rb") as handle:
        assert handle.readline() == b"up\n"
        supervisor.kill()
        supervisor.wait()
        assert handle.read() == b""


def test_a_job_ends_when_its_parent_is_killed():
    job = "from auto_research.runtime.process import die_with_parent; die_with_parent(); print('up', flush=True); import threading; threading.Event().wait()"
    parent = run_script(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", job, stdout=subprocess.PIPE
    )
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""  # the job held the pipe


def test_parent_watch_works_without_the_kernel_signal():
    job = "import sys; sys.platform = 'other'; from auto_research.runtime.process import die_with_parent; die_with_parent(); print('up', flush=True); import threading; threading.Event().wait()"
    parent = run_script(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", job, stdout=subprocess.PIPE
    )
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""
