"""What the device's process runs, by its path and in an interpreter without packages: the native runtime, for good."""

import ctypes
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host decides what Ctrl-C means
    path, *numbers = sys.argv[1:]
    serve = ctypes.CDLL(path).msl_device_serve
    serve.restype = ctypes.c_char_p
    reason = serve(*(ctypes.c_ulong(int(number)) for number in numbers))  # returns only where it could not begin
    sys.exit(reason.decode())


if __name__ == "__main__":
    main()
