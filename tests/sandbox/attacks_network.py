"""Attacks through sockets."""

from __future__ import annotations

from attack import Attack, group

NETWORK = group(
    "no byte reached a socket of the host, of another sandbox or of the world",
    [
        Attack(
            "connects to a service of the host",
            "s = socket.create_connection(('127.0.0.1', host['port']), 1); breach()",
        ),
        Attack(
            "connects to an abstract socket of the host",
            "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + host['abstract']); breach()",
        ),
        Attack(
            "sends to an abstract socket of the host from a pair",
            "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "a.sendto(b'x', '\\0' + host['abstract_datagram']); breach()",
        ),
        Attack(
            "reaches the internet and the cloud's metadata",
            "for address in (('169.254.169.254', 80), ('1.1.1.1', 443)):\n"
            "    if works(socket.create_connection, address, 0.3): breach(address)\n"
            "if works(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))): breach()",
            is_harmful=True,
            off="it would use the network",
        ),
        *(
            Attack(f"opens a {name} socket", f"if call(41, {family}, {kind}, 0)[0] >= 0: breach()")
            for name, family, kind in (("netlink", 16, 3), ("vsock", 40, 1), ("IPv6", 10, 1), ("UDP", 2, 2))
        ),
        Attack("opens a packet socket", "if call(41, 17, 3, 0)[0] >= 0: breach()", opens="root"),
        Attack(
            "pairs sockets of another family", "if answered(53, 16, 3, 0, ctypes.create_string_buffer(8)): breach()"
        ),
        Attack(
            "opens sockets of rare families",
            "for family in (3, 4, 5, 9, 15, 21, 29, 30, 31, 36, 37, 38, 39, 41, 42, 43, 44, 45):\n"
            "    if answered(41, family, 5, 0) or answered(41, family, 2, 0): breach(family)",
        ),
        Attack("opens a raw socket", "if call(41, 2, 3, 1)[0] >= 0: breach()", opens="root"),
        Attack(
            "gives the kernel a program by a socket",
            "class Program(ctypes.Structure): _fields_ = [('n', ctypes.c_ushort), ('p', ctypes.c_void_p)]\n"
            "code = (ctypes.c_uint64 * 1)(6)\na, b = socket.socketpair()\n"
            "given = Program(1, ctypes.addressof(code))\n"
            "if call(54, a.fileno(), 1, 26, ctypes.byref(given), 16)[0] == 0: breach()",
        ),
        Attack(
            "listens where others of the host would connect",
            "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); breach()",
        ),
        Attack(
            "claims an abstract name of the host",
            "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + host['abstract'] + '-claimed'); breach()",
        ),
    ],
)
