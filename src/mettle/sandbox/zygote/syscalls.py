"""The system call numbers of x86_64 that the filter speaks of, and what becomes of each.

`PLAIN` calls are allowed with any argument; `CHECKED` ones depend on an argument (see `seccomp.py`); every other call
fails with EPERM, so that code sees a refusal that it knows how to handle, and `PRETEND_MISSING` ones with ENOSYS, so
that the C library falls back to a call that can be checked.
"""

from __future__ import annotations

from typing import Final

LAST_KNOWN: Final = 450

_FILES: Final = (
    "read:0 write:1 open:2 close:3 stat:4 fstat:5 lstat:6 poll:7 lseek:8 pread64:17 pwrite64:18 readv:19 writev:20 "
    "access:21 pipe:22 select:23 dup:32 dup2:33 sendfile:40 fsync:74 fdatasync:75 truncate:76 "
    "ftruncate:77 getdents:78 getcwd:79 chdir:80 fchdir:81 rename:82 mkdir:83 rmdir:84 creat:85 link:86 unlink:87 "
    "symlink:88 readlink:89 chmod:90 fchmod:91 chown:92 fchown:93 lchown:94 umask:95 utime:132 mknod:133 statfs:137 "
    "fstatfs:138 readahead:187 getxattr:191 lgetxattr:192 fgetxattr:193 listxattr:194 llistxattr:195 flistxattr:196 "
    "getdents64:217 fadvise64:221 utimes:235 openat:257 "
    "mkdirat:258 mknodat:259 fchownat:260 futimesat:261 newfstatat:262 unlinkat:263 renameat:264 linkat:265 "
    "symlinkat:266 readlinkat:267 fchmodat:268 faccessat:269 pselect6:270 ppoll:271 sync_file_range:277 utimensat:280 "
    "fallocate:285 dup3:292 pipe2:293 preadv:295 pwritev:296 renameat2:316 copy_file_range:326 "
    "preadv2:327 pwritev2:328 statx:332 close_range:436 openat2:437 faccessat2:439"
)
_MEMORY: Final = (
    "mprotect:10 munmap:11 brk:12 mremap:25 msync:26 mincore:27 madvise:28 mlock:149 munlock:150 mlockall:151 "
    "munlockall:152 get_mempolicy:239 mlock2:325 pkey_mprotect:329 pkey_alloc:330 pkey_free:331"
)
_PROCESSES: Final = (
    "rt_sigaction:13 rt_sigprocmask:14 rt_sigreturn:15 sched_yield:24 pause:34 getpid:39 execve:59 exit:60 wait4:61 "
    "kill:62 uname:63 getrlimit:97 getrusage:98 sysinfo:99 times:100 getuid:102 getgid:104 geteuid:107 getegid:108 "
    "setpgid:109 getppid:110 getpgrp:111 setsid:112 getgroups:115 getresuid:118 getresgid:120 getpgid:121 getsid:124 "
    "capget:125 rt_sigpending:127 rt_sigtimedwait:128 rt_sigqueueinfo:129 rt_sigsuspend:130 sigaltstack:131 "
    "getpriority:140 sched_getparam:143 sched_getscheduler:145 sched_get_priority_max:146 sched_get_priority_min:147 "
    "sched_rr_get_interval:148 arch_prctl:158 setrlimit:160 gettid:186 tkill:200 futex:202 sched_getaffinity:204 "
    "set_tid_address:218 restart_syscall:219 exit_group:231 tgkill:234 waitid:247 set_robust_list:273 "
    "get_robust_list:274 rt_tgsigqueueinfo:297 getcpu:309 sched_getattr:315 getrandom:318 membarrier:324 rseq:334 "
    "pidfd_send_signal:424 pidfd_open:434 futex_waitv:449"
)
_CLOCKS_AND_EVENTS: Final = (
    "nanosleep:35 getitimer:36 alarm:37 setitimer:38 gettimeofday:96 time:201 epoll_create:213 timer_create:222 "
    "timer_settime:223 timer_gettime:224 timer_getoverrun:225 timer_delete:226 clock_gettime:228 clock_getres:229 "
    "clock_nanosleep:230 epoll_wait:232 epoll_ctl:233 epoll_pwait:281 signalfd:282 timerfd_create:283 eventfd:284 "
    "timerfd_settime:286 timerfd_gettime:287 signalfd4:289 eventfd2:290 epoll_create1:291 epoll_pwait2:441"
)
# Ends of a socket pair can talk to each other; nothing can be bound, connected or listened on.
_SOCKET_PAIRS: Final = (
    "sendto:44 recvfrom:45 sendmsg:46 recvmsg:47 shutdown:48 getsockname:51 getpeername:52 "
    "getsockopt:55 recvmmsg:299 sendmmsg:307"
)
# Counted by the host's user, and limited by a namespace's own counter, where that can be set. For machines: tests that
# watched what the host lends would hear the host open its files.
_WATCHES: Final = "inotify_init:253 inotify_add_watch:254 inotify_rm_watch:255 inotify_init1:294"
# What Landlock does not control, or what reaches other processes of the same user: refused where it is all there is.
_BEYOND_LANDLOCK: Final = (
    "chmod:90 fchmod:91 chown:92 fchown:93 lchown:94 utime:132 mknod:133 mknodat:259 getxattr:191 "
    "lgetxattr:192 fgetxattr:193 listxattr:194 llistxattr:195 flistxattr:196 utimes:235 fchownat:260 futimesat:261 "
    "fchmodat:268 utimensat:280 execve:59 tkill:200 rt_sigqueueinfo:129 get_robust_list:274 pidfd_open:434 "
    "pidfd_send_signal:424 setpgid:109 fallocate:285 statfs:137 umask:95"
)
# Those that make an entry in a directory, besides open with O_CREAT.
_MAKING: Final = "mkdir:83 creat:85 link:86 symlink:88 mkdirat:258 linkat:265 symlinkat:266"
# What a machine's shells, compilers and servers also need. Its sockets are in a network of its own. Whole-file locks
# work on what the host lends read-only, too: a test has none, or it could keep the host from locking its files.
_MACHINES: Final = (
    "flock:73 connect:42 accept:43 bind:49 listen:50 setuid:105 setgid:106 setreuid:113 setregid:114 setresuid:117 "
    "setresgid:119 setfsuid:122 setfsgid:123 splice:275 tee:276 accept4:288"
)


def _numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split(":") for entry in text.split())}


PLAIN: Final = _numbers(" ".join((_FILES, _MEMORY, _PROCESSES, _CLOCKS_AND_EVENTS, _SOCKET_PAIRS)))
WATCHES: Final = _numbers(_WATCHES)
SOCKET_PAIRS: Final = _numbers(_SOCKET_PAIRS)
BEYOND_LANDLOCK: Final = _numbers(_BEYOND_LANDLOCK)
MAKING: Final = _numbers(_MAKING)
OPENS: Final = {"open": (2, 1), "openat": (257, 2)}  # number, and which argument has the flags
OPEN_BY_STRUCTURE: Final = 437  # openat2, whose flags no filter can see
SIGNALS: Final = _numbers("kill:62 tgkill:234 rt_tgsigqueueinfo:297")  # the first argument is a process
MACHINES: Final = _numbers(_MACHINES)
# Number, and how many of its arguments are users or groups.
CHANGES_OF_USER: Final = {
    "setuid": (105, 1),
    "setgid": (106, 1),
    "setreuid": (113, 2),
    "setregid": (114, 2),
    "setresuid": (117, 3),
    "setresgid": (119, 3),
    "setfsuid": (122, 1),
    "setfsgid": (123, 1),
}
SETGROUPS: Final = 116
SOCKET: Final = 41  # for a machine, of some families and protocols
FORKS: Final = _numbers("fork:57 vfork:58")
CHECKED: Final = _numbers(
    "mmap:9 ioctl:16 socketpair:53 setsockopt:54 clone:56 fcntl:72 setpriority:141 prctl:157 sched_setaffinity:203 "
    "prlimit64:302"
)
PRETEND_MISSING: Final = _numbers("clone3:435")
