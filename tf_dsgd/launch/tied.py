"""Processes that end with the one that started them. Linux only."""

# Linux kills the program when its parent dies, whatever kills that. Popen's preexec_fn would do it
# in a fork of a process with threads, which may hang.
_HEARS_INTERRUPTS = """
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
"""
_HEARS_BOTH = _HEARS_INTERRUPTS + "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
_PROGRAM = f"""
import ctypes, os, signal, sys
{_HEARS_INTERRUPTS}
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

TIE = ["-I", "-S", "-c", _PROGRAM]
"""Python's arguments; the parent's process id and the command follow them.

The parent is the thread that starts the program: that must live as long as the program is to.
"""

TIE_GENTLY = [
    *TIE[:-1],
    _PROGRAM.replace("SIGKILL", "SIGTERM").replace(_HEARS_INTERRUPTS, _HEARS_BOTH),
]
"""The same for a program that ends what it has started when it gets SIGTERM."""
