"""Python as on macOS, as far as Weft can notice; on PYTHONPATH it is that of child processes too."""

import fcntl
import os
import resource
import select
import signal
import socket
import sys
import types

MISSING: dict[types.ModuleType, str] = {
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_GROW F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_WRITE",
    os: "MFD_ALLOW_SEALING MFD_CLOEXEC O_TMPFILE copy_file_range eventfd eventfd_read memfd_create pidfd_open "
    "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity setns splice unshare",
    resource: "prlimit",
    select: "epoll",
    signal: "SIGPWR SIGRTMIN pidfd_send_signal",
    socket: "AF_NETLINK AF_VSOCK MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_KEEPIDLE TCP_QUICKACK "
    "TCP_USER_TIMEOUT",
}
FOLDERS = ("/proc/", "/sys/", "/dev/shm/")
FUNCTIONS = {"malloc_trim", "mallopt", "prctl"}


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Neither files nor functions of Linux's C library."""
    if event == "open" and str(arguments[0]).startswith(FOLDERS):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in FUNCTIONS:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {arguments[1]}): symbol not found")


for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
proxies = types.ModuleType("_scproxy")  # macOS alone has it, and urllib asks it there
proxies.__dict__.update(_get_proxies=dict, _get_proxy_settings=dict)
sys.modules["_scproxy"] = proxies
sys.platform = "darwin"
sys.addaudithook(refuse)
