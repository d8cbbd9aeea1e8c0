"""A process with many open descriptors."""

import contextlib
import os
import resource

import pytest

ABOVE_SELECT = 1024


@pytest.fixture
def many_descriptors():
    """Whatever is opened next has a number that `select.select` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ABOVE_SELECT + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this host lets a process open {hard} files")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with contextlib.ExitStack() as held:
        number = 0
        while number < ABOVE_SELECT:
            number = os.open(os.devnull, os.O_RDONLY)
            held.callback(os.close, number)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
