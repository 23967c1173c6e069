"""What holds for all tests."""

from __future__ import annotations

import signal

# A CI that runs us in the background of a shell has Ctrl-C ignored, and all children would inherit
# that; the tests that press Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
