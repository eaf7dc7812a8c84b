"""A stub agent for tests of starters: reads its orders, connects, and obeys the stub manager."""

import hashlib
import json
import os
import signal
import socket
import sys


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: answer(heard="SIGTERM"))
    orders = json.loads(sys.stdin.readline())
    host, _, port = orders["manager"].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    asked, answers = connection.makefile("r"), connection.makefile("w")

    def answer(**words: object) -> None:
        print(json.dumps(words), file=answers, flush=True)

    answer(
        machine=orders["machine"],
        pid=os.getpid(),
        hostname=socket.gethostname(),
        cwd=os.getcwd(),
        proof=hashlib.sha256(orders["credential"]["key"].encode()).hexdigest(),
        environment={name: os.environ[name] for name in os.environ if name.startswith("SLURM_")},
    )
    for line in asked:
        word, _, rest = line.strip().partition(" ")
        if word == "say":
            print(rest, flush=True)
            answer(said=rest)
        elif word == "exit":
            sys.exit(int(rest))
        elif word == "stdin":
            answer(stdin=sys.stdin.readline())  # "" once it is closed


if __name__ == "__main__":
    main()
