"""Filters of system calls: a list of allowed calls; every other call fails with EPERM.

The filters are assembled by hand (classic BPF, a binary search over ranges of numbers). A foreign architecture or ABI
(int 0x80, x32) kills the process. There are two filters: the long one is installed once, in the fork server, and also
allows the calls that the server itself needs; the short one takes those away and is part of every run, which pays for
its length. A run obeys both.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

from marl_ray.sandbox.confinement.kernel import prctl

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2  # linux/prctl.h, and SECCOMP_MODE_FILTER of linux/seccomp.h
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS, as the next five of linux/bpf_common.h
_JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_SET = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_NUMBER, _ARCH = 0, 4  # bytes at which `nr` and `arch` stand in struct seccomp_data of linux/seccomp.h
ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW, as the next of linux/seccomp.h
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS
EPERM = 0x00050001  # SECCOMP_RET_ERRNO with the errno in its low 16 bits, as the next four
ENOSYS = 0x00050026  # errno 38
SUCCEED, ENOTTY, ENOTSUP = 0x00050000, 0x00050019, 0x0005005F
"""Results of calls that do nothing: 0, and errno 25 and 95. The kernel does not make the call."""
_THREAD = 0x3D0F00
"""clone flags of a thread, exactly as glibc and musl set them; any other clone is a new process or namespace."""

ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine: (AUDIT_ARCH, column of the table)."""

# name: numbers on x86-64 and on aarch64, -1 where there is none
_ALLOWED_CALLS = """
read 0 63 write 1 64 open 2 -1 close 3 57 stat 4 -1 fstat 5 80 lstat 6 -1 poll 7 -1 lseek 8 62 munmap 11 215 brk 12 214
rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136 rt_sigtimedwait 128 137
rt_sigsuspend 130 133 sigaltstack 131 132 pread64 17 67 pwrite64 18 68 readv 19 65 writev 20 66 preadv 295 69
pwritev 296 70 access 21 -1 pipe 22 -1 select 23 -1 sched_yield 24 124 mremap 25 216 msync 26 227 mincore 27 232
madvise 28 233 dup 32 23 dup2 33 -1 dup3 292 24 pause 34 -1 nanosleep 35 101 getitimer 36 102 alarm 37 -1
setitimer 38 103 getpid 39 172 getppid 110 173 gettid 186 178 sendto 44 206 recvfrom 45 207 shutdown 48 210
getsockname 51 204 getpeername 52 205 getsockopt 55 209 setsockopt 54 208 exit 60 93 exit_group 231 94 uname 63 160
truncate 76 45 ftruncate 77 46
getdents 78 -1 getdents64 217 61 getcwd 79 17 chdir 80 49 fchdir 81 50 rename 82 -1 renameat 264 38 renameat2 316 276
mkdir 83 -1 mkdirat 258 34 rmdir 84 -1 creat 85 -1 link 86 -1 linkat 265 37 unlink 87 -1 unlinkat 263 35 symlink 88 -1
symlinkat 266 36 readlink 89 -1 readlinkat 267 78 mknod 133 -1 mknodat 259 33 getxattr 191 8 lgetxattr 192 9
fgetxattr 193 10 listxattr 194 11 llistxattr 195 12 flistxattr 196 13 umask 95 166 gettimeofday 96 169 getrlimit 97 163
setrlimit 160 164 getrusage 98 165 sysinfo 99 179 times 100 153 getuid 102 174 geteuid 107 175 getgid 104 176
getegid 108 177 getgroups 115 158 getresuid 118 148 getresgid 120 150 getpgrp 111 -1 getpgid 121 155 getsid 124 156
statfs 137 43 fstatfs 138 44 sched_getaffinity 204 123 sched_getparam 143 121 sched_getscheduler 145 120
sched_get_priority_max 146 125 sched_get_priority_min 147 126 sched_rr_get_interval 148 127 getpriority 140 141
arch_prctl 158 -1 futex 202 98 set_tid_address 218 96 set_robust_list 273 99 get_robust_list 274 100
restart_syscall 219 128 clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115 time 201 -1
epoll_create 213 -1 epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 -1 epoll_pwait 281 22 epoll_pwait2 441 441
eventfd 284 -1 eventfd2 290 19 timerfd_create 283 85 timerfd_settime 286 86 timerfd_gettime 287 87 timer_create 222 107
timer_settime 223 110 timer_gettime 224 108 timer_getoverrun 225 109 timer_delete 226 111 pipe2 293 59 ppoll 271 73
pselect6 270 72 openat 257 56 newfstatat 262 79 statx 332 291 faccessat 269 48 faccessat2 439 439 getrandom 318 278
rseq 334 293 membarrier 324 283 close_range 436 436 sendfile 40 71 copy_file_range 326 285 getcpu 309 168 capget 125 90
wait4 61 260 waitid 247 95 signalfd4 289 74
"""
_ANSWERED_CALLS = """
flock 73 32 fsync 74 82 fdatasync 75 83 fadvise64 221 223
"""
"""Calls that succeed without effect: locks on the host's files, and flushing or dropping their pages, would be
noticeable outside of the run."""
_MODE_CALLS = """
chmod 90 -1 fchmod 91 52 fchmodat 268 53 fchmodat2 452 452
"""
"""Neither Landlock nor rlimits govern these; allowed if the host's files are another user's or read-only."""
_STAMP_CALLS = """
utime 132 -1 utimes 235 -1 utimensat 280 88 futimesat 261 -1 chown 92 -1 fchown 93 55 lchown 94 -1 fchownat 260 54
"""
"""Allowed if the host's files are read-only: a process that may write a file (/dev/null) may change its times, and any
may give it the owner that it has, which changes them too."""
_FALLOCATE_CALL = " fallocate 285 47 "
"""fallocate exceeds every size limit except that of a separate file system. Without it libraries write zeros instead."""
_CHECKED_CALLS = """
mmap 9 222 mprotect 10 226 clone3 435 435 socketpair 53 199 ioctl 16 29 fcntl 72 25
"""
_SERVER_CALLS = """
setsid 112 157 setgroups 116 159 setresuid 117 147 setresgid 119 149 capset 126 91 pidfd_open 434 434
landlock_restrict_self 446 446 landlock_create_ruleset 444 444 landlock_add_rule 445 445 mount 165 40 umount2 166 39
"""
"""Calls that a server needs on top, and that a run must not have."""
_RECEIVE_CALL = " recvmsg 47 212 "
"""Call by which descriptors arrive, at servers and judges."""
_SELF_CALLS = "clone 56 220 kill 62 129 tgkill 234 131 prlimit64 302 261 prctl 157 167"
"""Calls that a run may use on itself only."""

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_FCNTLS = (*range(6), 36, 1030, 1033, 1034)  # no F_SETOWN, F_SETSIG (signals to others), F_SETPIPE_SZ (memory)
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW and those of open files
_PRCTLS = (3, 15, 16, 39, 0x53564D41)  # get dumpable, set and get name, get no_new_privs, name a mapping
_SOCKET_PAIRS = (1, 0x801, 0x80001, 0x80801)  # SOCK_STREAM: a datagram socket could send to any other socket

Instruction = tuple[int, int, int, int]


def _call_numbers(table: str, column: int) -> dict[str, int]:
    """Return name -> number of the calls of a table that exist in the column's architecture."""
    words = table.split()
    numbers = {words[i]: int(words[i + 1 + column]) for i in range(0, len(words), 3)}
    return {name: number for name, number in numbers.items() if number >= 0}


def _load(offset: int) -> Instruction:
    """Return the instruction that loads the word at this byte of struct seccomp_data."""
    return (_LOAD, 0, 0, offset)


def _load_argument(index: int, high: bool = False) -> Instruction:
    return _load(16 + 8 * index + 4 * high)  # both architectures are little-endian


def _allow_one_of(
    index: int, values: Iterable[int], otherwise: int = EPERM, answered: Iterable[int] = ()
) -> list[Instruction]:
    """Allow a call if the low word of an argument is one of `values`.

    One of `answered` makes the call succeed without effect, any other word gives `otherwise`.
    """
    code = [_load_argument(index)]
    for action, matches in ((ALLOW, values), (SUCCEED, answered)):
        for value in matches:
            code += [(_JUMP_EQ, 0, 1, value & 0xFFFFFFFF), (_RETURN, 0, 0, action)]
    return [*code, (_RETURN, 0, 0, otherwise)]


def _allow_unless_all(index: int, bits: int) -> list[Instruction]:
    """Allow a call unless all of the bits are set."""
    return [
        _load_argument(index),
        (_AND, 0, 0, bits),
        (_JUMP_EQ, 0, 1, bits),
        (_RETURN, 0, 0, EPERM),
        (_RETURN, 0, 0, ALLOW),
    ]


_CHECKS = {
    "mmap": _allow_unless_all(2, 0b110),  # never writable and executable at once
    "mprotect": _allow_unless_all(2, 0b110),
    "clone3": [(_RETURN, 0, 0, ENOSYS)],  # its flags lie in memory; libraries fall back to clone
    "socketpair": [_load_argument(0), (_JUMP_EQ, 1, 0, 1), (_RETURN, 0, 0, EPERM), *_allow_one_of(1, _SOCKET_PAIRS)],
    "ioctl": _allow_one_of(1, _IOCTLS, otherwise=ENOTTY),
    "fcntl": _allow_one_of(1, _FCNTLS, answered=_LOCKS),
}


def _self_checks(pid: int) -> dict[str, list[Instruction]]:
    return {
        "clone": [
            _load_argument(0, high=True),
            (_JUMP_EQ, 1, 0, 0),
            (_RETURN, 0, 0, EPERM),
            *_allow_one_of(0, [_THREAD]),
        ],
        "kill": _allow_one_of(0, [pid]),
        "tgkill": _allow_one_of(0, [pid]),
        "prlimit64": _allow_one_of(0, [0, pid]),
        "prctl": _allow_one_of(0, _PRCTLS),
    }


def _binary_search(segments: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return a binary search: segment i runs from its first number up to the first of segment i + 1."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    lower, upper = _binary_search(segments[:middle]), _binary_search(segments[middle:])
    if len(lower) > 255:
        raise ValueError(f"{len(lower)} instructions are too far to jump")
    return [(_JUMP_GE, len(lower), 0, segments[middle][0]), *lower, *upper]


class Filter:
    """An assembled program, with holes for the process id that its checks name."""

    _HOLE = 0x7EADBEEF

    def __init__(self, arch: int, actions: dict[int, list[Instruction]], otherwise: int):
        """`actions` maps a call's number to its instructions.

        `otherwise` is for numbers below 0x1000 that `actions` does not contain.
        """
        segments: list[tuple[int, list[Instruction]]] = []
        for number in range(max(actions) + 2):
            action = actions.get(number, [(_RETURN, 0, 0, otherwise)])
            if not segments or segments[-1][1] != action:
                segments.append((number, action))
        segments.append((0x1000, [(_RETURN, 0, 0, ENOSYS)]))
        code = [_load(_ARCH), (_JUMP_EQ, 1, 0, arch), (_RETURN, 0, 0, KILL), _load(_NUMBER)]
        if arch == ARCHES["x86_64"][0]:
            code += [(_JUMP_SET, 0, 1, 0x40000000), (_RETURN, 0, 0, KILL)]  # x32
        code += _binary_search(segments)
        assembled = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
        hole = self._HOLE.to_bytes(4, "little")
        self._holes = [at for at in range(4, len(assembled), 8) if assembled[at : at + 4] == hole]
        self._code = ctypes.create_string_buffer(assembled, len(assembled))
        header = struct.pack("@HP", len(code), ctypes.addressof(self._code))
        self._header = ctypes.create_string_buffer(header, len(header))

    def __len__(self) -> int:
        """Return the number of instructions."""
        return len(self._code) // 8

    @classmethod
    def of_server(cls, machine: str, allocates: bool) -> "Filter":
        """Return the server's filter, which allows the calls listed here and no other.

        With `allocates` runs may call fallocate, because they can write to no file system but their own.
        """
        arch, column = ARCHES[machine]
        plain = _call_numbers(
            _ALLOWED_CALLS + _MODE_CALLS + _STAMP_CALLS + _SERVER_CALLS + _RECEIVE_CALL + _SELF_CALLS, column
        )
        actions = {number: [(_RETURN, 0, 0, ALLOW)] for number in plain.values()}
        actions |= {number: [(_RETURN, 0, 0, SUCCEED)] for number in _call_numbers(_ANSWERED_CALLS, column).values()}
        fallocate = ALLOW if allocates else ENOTSUP
        actions |= {number: [(_RETURN, 0, 0, fallocate)] for number in _call_numbers(_FALLOCATE_CALL, column).values()}
        actions |= {number: _CHECKS[name] for name, number in _call_numbers(_CHECKED_CALLS, column).items()}
        return cls(arch, actions, EPERM)

    @classmethod
    def of_run(cls, machine: str, changes_modes: bool, changes_times: bool, receives: bool = False) -> "Filter":
        """Return the filter of a run or a judge, which takes some calls away.

        The run or judge may change the modes of files with `changes_modes`, their times and owners with
        `changes_times`, and take descriptors from a socket with `receives`.
        """
        arch, column = ARCHES[machine]
        removed = _SERVER_CALLS
        for table, is_allowed in (
            (_RECEIVE_CALL, receives),
            (_MODE_CALLS, changes_modes),
            (_STAMP_CALLS, changes_times),
        ):
            removed += "" if is_allowed else table
        actions = {number: [(_RETURN, 0, 0, EPERM)] for number in _call_numbers(removed, column).values()}
        checks = _self_checks(cls._HOLE)
        actions |= {number: checks[name] for name, number in _call_numbers(_SELF_CALLS, column).items()}
        return cls(arch, actions, ALLOW)

    def install(self) -> None:
        """Filter this process, for good. Needs no_new_privs."""
        pid = os.getpid().to_bytes(4, "little")
        for at in self._holes:
            ctypes.memmove(ctypes.addressof(self._code) + at, pid, 4)
        prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(self._header))


def is_supported(machine: str) -> bool:
    """Return True if filters can be made for this system and machine (as `platform.machine()` names it)."""
    return sys.platform == "linux" and sys.byteorder == "little" and machine in ARCHES
