"""Machines to work in: a private file system, network and process tree that live until they are deleted.

    async with MachinePool(SandboxConfig()) as machines:
        machine = await machines.create(MachineConfig(memory_mb=512))
        result = await machine.exec("echo $((6 * 7)) > answer; cat answer")

    config.py      limits, lifetime and first files
    pool.py        making them, measuring their isolation, ending them in time
    machine.py     commands, jobs, files and ports of one
    execution.py   one command from order to result; jobs.py as its owner holds it; pipes.py its input and output
    transfers.py   files in and out; files.py what travels; channel.py the socket to its process 1
The other end is `zygote/machine.py`.
"""
