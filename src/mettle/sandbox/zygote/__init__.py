"""The process tree that runs untrusted code: a template, its cells, and in each cell one child per test.

These modules run in a bare interpreter (no site-packages, a clean environment), so they import only the
standard library and each other. The owner's side of the same sockets is `templates.py` and `cells.py`, one folder up.

    template.py   the zygote: builds the read-only root, then clones one cell per request
    cell.py       process 1 of a cell: takes tests from the owner, starts a child for each, watches and reaps it
    ballast.py    fills the holes in the template's memory, so that clones write to few pages
    child.py      closes every door behind the judged code, then becomes it
    watch.py      what a test's processes have used; kernel_memory.py and mappings.py, what else they hold
    pss.py        their memory exactly, as far as the kernel tells in time
    rootfs.py     the file system that judged code sees
    host_users.py a user of the host's for each cell and machine, so that they share no count of the kernel's
    seccomp.py    the system calls that judged code may make
    landlock.py   what the kernel itself lets it do with files, TCP and signals: a second line
    kernel.py     the system calls that Python has no function for
    values.py     exact Python values as bytes
    frames.py     messages on a socket
"""
