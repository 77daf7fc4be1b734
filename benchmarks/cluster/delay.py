"""A switch that holds every packet back for a fixed time. Runs in the switch's namespace, as a script.

    python delay.py SECONDS PORT...      PORT r leads to the host with the address 02:00:00:00:00:(r + 1)

For kernels without netem, their own means of delaying packets, which many virtual machines leave out. This
takes whole segments from one cable's end and gives them to another's (packet sockets with PACKET_VNET_HDR,
so that nothing is cut up or put together), and ends when its standard input is closed. It is accurate to a
few hundredths of a millisecond, and costs about half a core at 400 Mbit/s both ways: have a core to spare.
"""

import collections
import contextlib
import gc
import os
import select
import socket
import sys
import time

# From linux/if_packet.h and asm-generic/socket.h: Python does not name these.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
HEADER = 10  # struct virtio_net_hdr, in front of every packet
BUFFER = 16 << 20  # bytes: what a fast wire sends while this program waits for a core
LARGEST = HEADER + 14 + 65536
AT_ONCE = 16  # packets taken from one port before the others get their turn


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def relay(ports: list[socket.socket], delay: float) -> None:
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    late = 0.0  # how long waking up takes, learnt; a virtual machine needs some 0.05 ms
    while True:
        timeout = max(0.0, waiting[0][0] - late - time.perf_counter()) if waiting else None
        # select, because epoll and poll count in whole milliseconds.
        ready = select.select([sys.stdin, *ports], [], [], timeout)[0]
        if sys.stdin in ready:
            return
        for port in (port for port in ports if port in ready):
            for _ in range(AT_ONCE):
                try:
                    packet = port.recv(LARGEST)
                except BlockingIOError:
                    break
                rank = packet[HEADER + 5] - 1  # the last byte of the destination's address
                if packet[HEADER] == 0x02 and 0 <= rank < len(ports):
                    waiting.append((time.perf_counter() + delay, ports[rank], packet))
        now = time.perf_counter()
        while waiting and waiting[0][0] - late <= now:
            due, port, packet = waiting.popleft()
            late = min(max(late + 0.02 * (now - due), 0.0), delay)
            # A full queue drops, as in any switch; TCP sends again.
            with contextlib.suppress(BlockingIOError, OSError):
                port.send(packet)


def main() -> None:
    ports = [open_port(name) for name in sys.argv[2:]]
    # Ahead of the ranks that compute on the same cores: a packet must not wait for a time slice.
    with contextlib.suppress(PermissionError, OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print("ready", flush=True)
    relay(ports, float(sys.argv[1]))


if __name__ == "__main__":
    main()
